"""Collectives: seconds to move bytes among the ranks of a group.

A ring passes each byte once over every link, so a rank receives at the rate of the slowest of: the fast links of its
domain, and its share of the domain's network ports, as many ports as the group has ranks in the domain (Thakur 2005;
Narayanan 2021, sec. 4.1). A gather takes one step for each rank but one: one between two neighbouring domains, all
others inside domains (NCCL's tuning.cc counts a ring's latency so).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from superstep.hardware.units import Array

WIRINGS = ("switched", "mesh", "cube")
"""Wirings of a domain; a torus counts as switched: a group of its chips is assumed to have all of its links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links between chips.

    Attributes:
        link_bytes_per_s, link_latency_s: one chip over the fast links of its domain, one direction.
        domain: chips that these join.
        network_bytes_per_s, network_latency_s: one chip between domains.
        send_share: share of these rates for a transfer between two ranks, which opens fewer channels than a ring.
        wiring: 0 where a switch joins a domain, 1 where each chip has a link to each other, 2 where the links are the
        edges of a cube. Without a switch a small group has fewer of a chip's links between its members.
    """

    link_bytes_per_s: Array
    link_latency_s: Array
    domain: Array
    network_bytes_per_s: Array
    network_latency_s: Array
    send_share: Array
    wiring: Array = field(default_factory=lambda: np.zeros(()))

    def within(self, local: Array) -> Array:
        """Bytes a second of one chip to ``local`` chips of its domain, itself among them."""
        others = np.maximum(np.minimum(local, self.domain), 2.0)
        share = np.where(self.wiring == WIRINGS.index("mesh"), (others - 1) / np.maximum(self.domain - 1, 1.0), 1.0)
        edges = np.log2(others) / np.log2(np.maximum(self.domain, 2.0))
        rate: Array = self.link_bytes_per_s * np.where(self.wiring == WIRINGS.index("cube"), edges, share)
        return rate


@dataclass(frozen=True, slots=True)
class RankGroup:
    """``ranks`` ranks, each ``stride`` chips from the next; arrays of one shape are as many groups."""

    ranks: Array
    stride: Array

    def local(self, domain: Array) -> Array:
        """Ranks of the group that share a domain."""
        shared: Array = np.clip(np.floor(domain / self.stride), 1.0, self.ranks)
        return shared


def gather_s(size: Array, group: RankGroup, links: Links) -> Array:
    """Seconds to gather ``size`` bytes on every rank, a part from each; a reduce-scatter takes the same."""
    local = group.local(links.domain)
    domains = np.ceil(group.ranks / local)
    # Between domains, as many ports carry the ring as the group has ranks in a domain.
    outside = np.where(domains > 1, 1 / (links.network_bytes_per_s * local), 0.0)
    inside = np.where(local > 1, 1 / links.within(local), 0.0)
    share = (group.ranks - 1) / group.ranks
    steps = (group.ranks - domains) * links.link_latency_s + (domains - 1) * links.network_latency_s
    seconds: Array = size * share * np.maximum(inside, outside) + steps
    return seconds


def relay_s(size: Array, group: RankGroup, links: Links) -> Array:
    """Seconds to pass the parts of ``size`` bytes once round the group, each rank sending to the next.

    One rank of a domain sends to the next domain, through its own port, and all wait for it (Liu 2023).
    """
    local = group.local(links.domain)
    is_wide = group.ranks > local
    near = links.within(local)
    slowest = np.where(is_wide, np.minimum(near, links.network_bytes_per_s), near)
    latency = np.where(is_wide, np.maximum(links.link_latency_s, links.network_latency_s), links.link_latency_s)
    seconds: Array = (group.ranks - 1) * (size / group.ranks / slowest + latency)
    return seconds


def all_reduce_s(size: Array, group: RankGroup, links: Links) -> Array:
    """Seconds to sum ``size`` bytes of every rank over the group: reduce-scatter, then gather.

    Over many domains a tree replaces the ring: a chain in each domain, and between domains latency grows with the
    logarithm.
    """
    local = group.local(links.domain)
    domains = np.ceil(group.ranks / local)
    ring = 2 * gather_s(size, group, links)
    within = (group.ranks - domains - (local - 1)) * links.link_latency_s
    between = (domains - 1 - 2 * np.ceil(np.log2(np.maximum(domains, 1.0)))) * links.network_latency_s
    seconds: Array = ring - 2 * np.maximum(within + between, 0.0)
    return seconds


def all_to_all_s(size: Array, group: RankGroup, links: Links) -> Array:
    """Seconds to send ``size`` bytes from every rank, a part to each."""
    local = group.local(links.domain)
    part = size / group.ranks
    outside = part * (group.ranks - local) / links.network_bytes_per_s
    inside = part * (local - 1) / links.within(local)
    steps = (local - 1) * links.link_latency_s + np.where(group.ranks > local, links.network_latency_s, 0.0)
    return np.maximum(inside, outside) + steps


def dispatch_s(size: Array, copies: Array, group: RankGroup, links: Links) -> Array:
    """Seconds to send every rank's ``size`` bytes of tokens to ``copies`` experts each, once to a domain.

    Of n domains a token with k random experts visits n · (1 - (1 - 1/n)^k); within a domain it is copied on.
    """
    local = group.local(links.domain)
    domains = np.ceil(group.ranks / local)
    visited = domains * (1 - (1 - 1 / domains) ** copies)
    outside = size * visited * (domains - 1) / domains / links.network_bytes_per_s
    inside = size * copies * (local - 1) / local / links.within(local)
    steps = (local - 1) * links.link_latency_s + np.where(domains > 1, links.network_latency_s, 0.0)
    seconds: Array = np.maximum(inside, outside) + steps
    return seconds


def send_s(size: Array, stride: Array, links: Links) -> Array:
    """Seconds to send ``size`` bytes to the rank ``stride`` chips away."""
    is_near = stride < links.domain
    rate = links.send_share * np.where(is_near, links.within(np.asarray(2.0)), links.network_bytes_per_s)
    return size / rate + np.where(is_near, links.link_latency_s, links.network_latency_s)
