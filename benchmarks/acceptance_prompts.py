"""Prompts of four kinds for benchmarks with instruction-tuned models."""

PROMPTS: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python function that merges two sorted lists without using sort().",
        "Implement an LRU cache class in Python with get and put in constant time.",
        "Write a SQL query that returns the three best-selling products of each month.",
        "Write a shell script that renames all .jpeg files of a folder to .jpg.",
        "Implement binary search in Rust, with a test.",
        "Write a TypeScript function that debounces another function.",
    ),
    "prose": (
        "Write the opening paragraph of a story about a lighthouse keeper who finds a letter.",
        "Describe a market in the early morning in about a hundred words.",
        "Explain to a ten-year-old why the sky is blue.",
        "Write a short speech for a colleague who retires after thirty years.",
        "Summarise how the steam engine changed cities in the nineteenth century.",
        "Write a review of a small family restaurant that you liked in spite of its service.",
    ),
    "chat": (
        "I slept badly this week. What could I try tonight?",
        "Which is the better first instrument for an adult, piano or guitar?",
        "My bread never rises properly. What are the usual reasons?",
        "Can you suggest a plan for three days in Lisbon with two children?",
        "What should I ask a landlord before I sign a contract?",
        "I have to give my first talk next week and I am nervous. Any advice?",
    ),
    "translation": (
        "Translate into German: The meeting has been moved to Thursday because the room is not available.",
        "Translate into French: If the package does not arrive by Friday, please write to us again.",
        "Translate into Spanish: She opened the window, and the whole street smelled of fresh bread.",
        "Translate into English: Der Zug hatte zwanzig Minuten Verspätung, deshalb habe ich den Anschluss verpasst.",
        "Translate into English: Nous avons visité le musée le matin et la vieille ville l'après-midi.",
        "Translate into Italian: Every change to this document must be approved by two people.",
    ),
}
