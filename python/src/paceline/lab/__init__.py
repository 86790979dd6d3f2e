"""A cluster on one machine: hosts made of network namespaces, with links of their own."""

from paceline.lab.record import INTERFACE, Host
from paceline.lab.session import Lab
from paceline.lab.settings import LabSettings, why_not

__all__ = ["INTERFACE", "Host", "Lab", "LabSettings", "why_not"]
