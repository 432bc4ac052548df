"""Autoscaling policies: pure functions of explicit state and a snapshot. Delays, hysteresis and warm-up are theirs."""

from cluster.autoscaling.application import ApplicationSettings, ApplicationState, Decisions, decide
from cluster.autoscaling.merged_load import merged_load
from cluster.autoscaling.settings import DrafterSettings, IngressSettings, ScalingLimits, TargetSettings
from cluster.autoscaling.snapshot import ReplicaCounts, ServiceSnapshot

__all__ = [
    "ApplicationSettings",
    "ApplicationState",
    "Decisions",
    "DrafterSettings",
    "IngressSettings",
    "ReplicaCounts",
    "ScalingLimits",
    "ServiceSnapshot",
    "TargetSettings",
    "decide",
    "merged_load",
]
