"""`distaccum audit`: what the accumulation of an unchanged script does.

Hooks observe (`watch`, with `heard`, `criterions`, `schedules`, `trained`), and `ledger` keeps receipts of
each parameter: random projections, which add up as gradients do. At each step of an optimizer this becomes a row of
plain numbers, which ranks exchange (`share`). All that is said is read from rows alone, of one optimizer at a time:
`parts` has the weight that each backward gave to a criterion's units, and `reckoning` what each gradient is the sum of.
Rules (`judge`, `weights`, `schedules`) find facts and, in the same numbers, faults: wrong is what differs within a run,
or a level with one reading; what is unknown is said not to be judged. `session` and `run` make a text of it.
"""
