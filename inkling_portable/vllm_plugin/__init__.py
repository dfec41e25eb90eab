"""Inkling in vLLM: a plug-in. vLLM finds it by its entry point and calls `plugin.register` in every process.

The model that runs is `inkling_portable.model.Inkling`, the one that the engine of this package runs. vLLM brings its
parallel linear layers (`parts`), its paged caches (`state`), its expert balancer (`balance`) and its scheduling;
`policy` says where this model stands in for vLLM's own, `options` what it refuses, `versions` which vLLM it was tried
with. No arithmetic lives here.
"""
