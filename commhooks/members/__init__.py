"""Machines that come and go while local steps train (`members="torchft"`); docs/members.md
describes it for users.
"""
