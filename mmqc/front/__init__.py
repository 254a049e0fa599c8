"""What runs in front of the compiled region, so that the region is one graph.

    call ─► Front.begin (eager): metadata from integer inputs ─► one Dynamo graph ─► Front.end

``observe``   one eager forward: which functions read values out of integer tensors, and from which inputs
``handover``  those functions run in front; inside the traced region their results are read instead
``attention`` one variable-length attention call in place of a split by sequence lengths
``front``     the hooks of one model, what was found for each kind of call, and the record of it
``exportable`` the whole forward as one exported program; ``index_ops`` holds what stands for those functions in it,
              ``index_find`` and ``index_draw`` find and verify it
``programs``  the forward and its parts vision, prefill, decode (``static_cache``) as modules; ``variants`` makes batches of other
              sizes of one, ``step_batches`` those of the parts, and compares the parts with the whole
"""
