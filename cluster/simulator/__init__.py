"""A model of the service under traffic, to try autoscaling policies on: no device, no network, no real time."""

from cluster.simulator.devices import Devices
from cluster.simulator.runs import Objectives, Outcome, Sample, Scaler, Scaling, simulate
from cluster.simulator.service import SimulatedService
from cluster.simulator.traffic import Request, Trace, bursts, diurnal, drift

__all__ = [
    "Devices",
    "Objectives",
    "Outcome",
    "Request",
    "Sample",
    "Scaler",
    "Scaling",
    "SimulatedService",
    "Trace",
    "bursts",
    "diurnal",
    "drift",
    "simulate",
]
