"""Checking the spec against what was made with it: plan, records and seal, and the metadata that it determines."""

from collections.abc import Iterator

from cache_store.cache.files import open_plan
from cache_store.cache.metadata import metadata_of
from cache_store.cache.survey import Survey, held_recipe
from cache_store.errors import CacheError, StaleError
from cache_store.format.schema import Spec
from cache_store.storage.store import Store
from cache_store.verify.file import unreadable
from cache_store.verify.findings import Finding


def is_contradicted(survey: Survey, spec: Spec) -> bool:
    """Whether the spec is at fault: records are of another recipe, or else the seal and the plan of another spec."""
    try:
        if held_recipe(survey) != spec.recipe:
            return True
    except StaleError:
        return False  # records differ among themselves, and are found one by one
    seal = survey.seal.value
    return seal is not None and seal.spec_digest != spec.digest and not is_planned(survey.store, spec)


def is_planned(store: Store, spec: Spec) -> bool:
    """Whether the plan is the spec's, or says nothing."""
    try:
        plan = open_plan(store)
        return plan.num_rows == spec.rows and plan.digests()[0] == spec.plan_digest
    except CacheError:
        return True


def metadata_findings(store: Store, spec: Spec) -> Iterator[Finding]:
    for name, expected in metadata_of(spec):
        try:
            if store.read(name) != expected:
                yield Finding(file=name, problem="is not what the spec says it should be")
        except (CacheError, OSError) as error:
            yield unreadable(error, store, name)
