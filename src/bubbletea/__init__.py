"""BubbleTea: prefill of language-model inference in the bubbles of training. Nothing here runs yet: it pours
once Atlas trains."""
