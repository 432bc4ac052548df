"""The prompts that `leadout check-pair` measures with: code and prose, as questions and as beginnings."""

QUESTIONS = (
    "Write a Python function that returns the n largest numbers of a list, without using sorted().",
    "Write a shell command that counts the lines of all .py files below a folder.",
    "Explain in a few sentences why the sky is blue.",
    "Write the opening paragraph of a story about a lighthouse keeper who finds a letter.",
    "Translate into French: The meeting has been moved to Thursday because the room is not available.",
    "What should I ask a landlord before I sign a contract?",
)
"""For models with a chat template."""

BEGINNINGS = (
    'def read_lines(path):\n    """Return the lines of a text file."""\n',
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "for index, value in enumerate(values):\n",
    "The history of the steam engine begins",
    "On the first morning of the year, the harbour was",
)
"""For models without one."""
