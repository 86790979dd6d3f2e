"""A simulated cluster on one machine: hosts are network namespaces with virtual links."""

from paceline.runner.lab.network import why_not
from paceline.runner.lab.record import INTERFACE, Host, LabSettings
from paceline.runner.lab.session import Lab

__all__ = ["INTERFACE", "Host", "Lab", "LabSettings", "why_not"]
