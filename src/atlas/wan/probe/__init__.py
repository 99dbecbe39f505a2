"""Measuring the paths between real hosts: an agent on each, a survey that asks them, and what a cluster file says
of it. Transfers are short and bounded; agents speak only to who knows the shared token.
"""

from __future__ import annotations

from atlas.wan.probe.agent import Agent
from atlas.wan.probe.links import drift, links_yaml, with_links
from atlas.wan.probe.survey import LinkMeasurement, Survey, survey

__all__ = ["Agent", "LinkMeasurement", "Survey", "drift", "links_yaml", "survey", "with_links"]
