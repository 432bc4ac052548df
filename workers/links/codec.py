"""Messages as bytes: msgpack by msgspec, read back into the declared types only, so no bytes can run code.

A frame is a small envelope around the message's own msgpack, which is read by the name of the message's type. An array
is an extension: code 1 (int32) or 2 (float32) of one dimension, 3 or 4 of two, whose shape comes first.
"""

import functools
from dataclasses import dataclass
from struct import Struct, error
from typing import Any, TypeAlias, get_args

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, Encoder, Ext

from workers.errors import LinkError
from workers.links.base import worker_failed
from workers.messages import WorkerRequest, WorkerResponse

AnyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_FAILURE = "failure"
_NOTHING = "nothing"
_DTYPES = (np.dtype(np.int32), np.dtype(np.float32))
_SHAPE = Struct("<II")


@dataclass(frozen=True, slots=True)
class Request:
    """A message to a worker. `number` rises along the link with the id `link`."""

    link: int
    number: int
    kind: str
    body: msgspec.Raw

    def message(self) -> WorkerRequest:
        """Return the message. Raises LinkError if it cannot be read."""
        message: WorkerRequest = _read(_REQUEST_DECODERS, self.kind, self.body)
        return message


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer to the message of that number."""

    number: int
    kind: str
    body: msgspec.Raw

    def result(self) -> WorkerResponse | None:
        """Return what the worker answered. Raises LinkError if that is an error, or cannot be read."""
        if self.kind == _NOTHING:
            return None
        if self.kind == _FAILURE:
            raise worker_failed(_read({_FAILURE: _FAILURE_DECODER}, self.kind, self.body))
        response: WorkerResponse = _read(_ANSWER_DECODERS, self.kind, self.body)
        return response


def encode_request(link: int, number: int, message: WorkerRequest) -> bytes:
    """Return the frame of a message. Raises LinkError if it holds what cannot be sent."""
    return _ENCODER.encode((link, number, *_written(_REQUEST_DECODERS, message)))


def decode_request(frame: bytes) -> Request:
    """Return the request in a frame, its message still unread. Raises LinkError if there is none."""
    return Request(*_opened(_REQUEST_ENVELOPE, frame))


def encode_answer(number: int, response: WorkerResponse | None) -> bytes:
    """Return the frame of an answer. Raises LinkError if it holds what cannot be sent."""
    written = (_NOTHING, None) if response is None else _written(_ANSWER_DECODERS, response)
    return _ENCODER.encode((number, *written))


def encode_failure(number: int, reason: str) -> bytes:
    """Return the frame that says that the worker failed."""
    # Text that came with an error may hold what is not Unicode.
    return _ENCODER.encode((number, _FAILURE, reason.encode(errors="backslashreplace").decode()))


def decode_answer(frame: bytes) -> Answer:
    """Return the answer in a frame, its result still unread. Raises LinkError if there is none."""
    return Answer(*_opened(_ANSWER_ENVELOPE, frame))


# --- envelope and message -----------------------------------------------------------------------------------


def _written(decoders: dict[str, Decoder[Any]], message: object) -> tuple[str, msgspec.Raw]:
    kind = type(message).__name__
    if kind not in decoders:
        raise LinkError(f"{kind} is not a message of this direction")
    try:
        return kind, msgspec.Raw(_ENCODER.encode(message))
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError) as problem:
        raise LinkError(f"{kind} cannot be sent: {problem}") from problem


def _opened(envelope: Decoder[Any], frame: bytes) -> Any:
    try:
        return envelope.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        raise LinkError(f"not a message: {problem}") from problem


def _read(decoders: dict[str, Decoder[Any]], kind: str, body: msgspec.Raw) -> Any:
    decoder = decoders.get(kind)
    if decoder is None:
        raise LinkError(f"unknown message {kind[:64]!r}")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        raise LinkError(f"{kind} cannot be read: {problem}") from problem


# --- arrays -------------------------------------------------------------------------------------------------


def _from_numpy(value: object) -> object:
    """Return what stands for a numpy array or scalar in msgpack."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray) or value.dtype not in _DTYPES or value.ndim not in (1, 2):
        raise NotImplementedError(f"{type(value).__name__} {getattr(value, 'dtype', '')}")
    code = 1 + _DTYPES.index(value.dtype)
    if value.ndim == 1:
        return Ext(code, value.tobytes())
    return Ext(code + len(_DTYPES), _SHAPE.pack(*value.shape) + value.tobytes())


def _to_array(code: int, data: memoryview) -> AnyArray:
    """Return the array of an extension; it is read-only, like those that Ray hands over."""
    if not 1 <= code <= 2 * len(_DTYPES):
        raise ValueError(f"unknown extension {code}")
    two_dimensions, dtype_index = divmod(code - 1, len(_DTYPES))
    dtype = _DTYPES[dtype_index]
    # Copied, so that the numbers are aligned in memory and the frame can go.
    if not two_dimensions:
        return np.frombuffer(data.tobytes(), dtype)
    try:
        shape = _SHAPE.unpack_from(data)
    except error as problem:
        raise ValueError("an array without its shape") from problem
    return np.frombuffer(data[_SHAPE.size :].tobytes(), dtype).reshape(shape)


def _checked(declared: Any, value: object) -> object:
    """Let an array through where an array of its dtype is declared."""
    dtype = _declared_dtype(declared)
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        raise ValueError(f"expected an array of {dtype}")
    return value


@functools.cache
def _declared_dtype(declared: Any) -> np.dtype[Any]:
    """Return T of NDArray[T], which is ndarray[shape, dtype[T]]."""
    (scalar,) = get_args(get_args(declared)[1])
    dtype: np.dtype[Any] = np.dtype(scalar)
    return dtype


def _decoder(message_type: Any) -> Decoder[Any]:
    return Decoder(message_type, dec_hook=_checked, ext_hook=_to_array)


_ENCODER = Encoder(enc_hook=_from_numpy)
_REQUEST_DECODERS = {message.__name__: _decoder(message) for message in get_args(WorkerRequest)}
_ANSWER_DECODERS = {message.__name__: _decoder(message) for message in get_args(WorkerResponse)}
_FAILURE_DECODER = Decoder(str)
_REQUEST_ENVELOPE = Decoder(tuple[int, int, str, msgspec.Raw])
_ANSWER_ENVELOPE = Decoder(tuple[int, str, msgspec.Raw])
