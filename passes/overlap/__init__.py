"""overlap: what of each collective is exposed, under a policy. Functions on numbers and on costed graphs.

policies.parse_policy(text) -> Policy                  words and sets (`none`, `megatron`, ...) become flags
policychecks.check_policy(policy, *, tp, sp, ...)      what the framework would refuse with this layout
templates.schedule_phase(graph, phase, seconds, policy, setting) -> Scheduled    one phase of one layer
merging.merge_layers(forward, forward_s, backward, backward_s, policy, setting) -> Merged    a pair of layers
gradients.bucketed_exposed_s, gather_exposed_s, ...    reductions and parameter gathers over data-parallel ranks
gradients.buckets_in_backward_order(pieces, bucket_elements)    how a flat gradient buffer is cut
rings.ring_forward_exposed_s, ring_backward_exposed_s  context parallelism
streams.schedule(tasks, sms) -> Timeline               the scheduler below all of them
"""
