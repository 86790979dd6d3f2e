"""A simulated cluster on one machine: hosts are network namespaces with virtual links."""

from paceline.lab.network import why_not
from paceline.lab.record import INTERFACE, Host
from paceline.lab.session import Lab
from paceline.lab.settings import LabSettings

__all__ = ["INTERFACE", "Host", "Lab", "LabSettings", "why_not"]
