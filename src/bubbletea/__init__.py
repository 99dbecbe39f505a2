"""BubbleTea: prefill of language-model inference in the bubbles of training. The simulator (`sim`) and the service
(`serve`) share the windows and the admission of requests."""
