"""Steps that were launched and whose results are not known yet: who is in them, who waits for them, and what is assumed."""

from __future__ import annotations

from collections import deque

import numpy as np

from sparsespec.core.plan import StepPlan


class Flights:
    """State by slot. held: its request waits for a result. over: how many tokens its length is ahead of what is committed,
    since a verification under way is assumed to accept all drafts. Slots whose requests left meanwhile keep their pages
    until the last step that uses them has landed, so that nothing but later steps can touch these before."""

    def __init__(self, slots: int) -> None:
        self.held = np.zeros(slots, bool)
        self.over = np.zeros(slots, np.int32)
        self._plans: deque[StepPlan] = deque()
        self._steps = np.zeros(slots, np.int32)  # launched steps that use a slot
        self.left: list[int] = []  # slots that are to be freed once they have landed

    def __len__(self) -> int:
        return len(self._plans)

    def keep(self, slot: int) -> bool:
        """The slot's request has left; whether a launched step uses the slot, which `land` then gives back."""
        used = bool(self._steps[slot])
        if used:
            self.left.append(slot)
        return used

    def assume(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """The requests in distinct slots [n] go on as if they had these tokens [n] more."""
        self.held[slots] = False
        self.over[slots] += tokens

    def settle(self, slots: np.ndarray, assumed: np.ndarray) -> None:
        """Results for distinct slots [n] are there, of which `assumed` tokens [n] had been assumed."""
        self.held[slots] = False
        self.over[slots] -= assumed

    def knows(self, plan: StepPlan) -> bool:
        """Whether the plan was launched."""
        return any(plan is p for p in self._plans)

    def start(self, plan: StepPlan) -> None:
        """The plan was launched."""
        self._plans.append(plan)
        self._steps[plan.slots] += 1

    def land(self, plan: StepPlan) -> list[int]:
        """The oldest plan's result is there; gives the slots to be freed now. RuntimeError if it is not the oldest."""
        if self._plans.popleft() is not plan:
            raise RuntimeError("results are committed out of order")
        self._steps[plan.slots] -= 1
        if not self.left:
            return []
        gone = [slot for slot in self.left if not self._steps[slot]]
        self.left = [slot for slot in self.left if self._steps[slot]]
        return gone

    def clear(self, slot: int) -> None:
        """The slot is free."""
        self.held[slot], self.over[slot] = False, 0
