"""Programs run plain and planned: the same in every respect, within their budgets."""
