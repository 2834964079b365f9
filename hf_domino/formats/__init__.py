"""How other projects store Domino and DFlash drafters: their configurations and tensor names, told in ours.

`registry` finds the format of a configuration, or names its kind where it is not read; the modules beside it describe
one format each, and `loading` puts it all into the arguments of Transformers' own `from_pretrained`. The way back is
`exporting`; `engines` has what serving engines take of it.
"""
