"""What draft heads in folders of their own share: tensors, probes, speculation.json.

Reading and checking files, and telling by a short text which convention a drafter was
trained with. No single kind of head is known here.
"""
