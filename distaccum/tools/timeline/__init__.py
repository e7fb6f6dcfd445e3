"""All ranks' traces beside each other: when each computed, when the link was busy, who waited for whom."""
