"""`autoac demo`: train a small GPT with a plan, compared with the same training without one."""
