"""The progress bar of an audit: it counts samples, or seconds if only a time limit is set."""

from cache_store.program.progress_bar import progress_bar
from cache_store.refusal import counted
from precompute.config import AuditConfig


class AuditBar:
    """A tqdm bar to pass as the audit's `on_drawn`; call `close` at the end."""

    def __init__(self, config: AuditConfig) -> None:
        self._seconds = config.seconds if config.num_samples is None else None
        unit = "sample" if self._seconds is None else "s"
        self.bar = progress_bar(total=self._seconds, desc="audit", unit=unit, delay=0.5)
        self.close = self.bar.close

    def __call__(self, drawn: int, asked: int, seconds: float) -> None:
        """Show that `drawn` of `asked` samples have been compared after `seconds`."""
        if self._seconds is None:
            self.bar.total = asked
            self.bar.update(drawn - self.bar.n)
        else:
            self.bar.set_postfix_str(counted(drawn, "sample"), refresh=False)
            self.bar.update(min(round(seconds, 1), self._seconds) - self.bar.n)
