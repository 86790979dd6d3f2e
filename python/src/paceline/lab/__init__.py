"""A simulated cluster on one machine: hosts are network namespaces with virtual links."""

from paceline.lab.network import why_not
from paceline.lab.record import INTERFACE, Host, LabSettings
from paceline.lab.session import Lab

__all__ = ["INTERFACE", "Host", "Lab", "LabSettings", "why_not"]
