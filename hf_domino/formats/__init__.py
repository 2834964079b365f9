"""Read and write drafters in other projects' formats, by translating their configurations and tensor names.

`registry` finds the format of a configuration, or names the drafting method if we cannot read it. The modules beside it
describe one format each. `loading` turns the result into arguments of Transformers' own `from_pretrained`. `exporting`
writes our drafters for other projects, and `engines` knows what serving engines accept.
"""
