"""The command `study`: what training does to a drafter, by equal data and steps, one question a variant.

`study.yaml` says what is compared, `plan` reads it, `texts` lets the target write what all train on, `run` trains one
variant, `schedule` runs them in processes of their own, `rows` keeps a row a run, and `summary`, `page` and `figures`
show what the rows hold.
"""
