"""What the plan of a cluster raises."""


class PlanError(ValueError):
    """A plan cannot be made. The message is one line and names the key, model or accelerator."""
