"""``flashd plan``: what fits into some memory, and how fast it will be, before anything is loaded."""

from flashd.tools.plan.report import MemoryParts, PlanReport, PlanRow
from flashd.tools.plan.run import BUDGETS_PERCENT, plan

__all__ = ["BUDGETS_PERCENT", "MemoryParts", "PlanReport", "PlanRow", "plan"]
