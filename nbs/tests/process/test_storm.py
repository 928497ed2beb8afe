"""A run that something happens to all the time ends where those end that nothing happens to; and those raise no alarm."""
import os

import storm

STEPS = int(os.environ.get("MEDLAB_STORM", 400))  # bench/faults makes 3,000
CLEAN = int(os.environ.get("MEDLAB_CLEAN", 200))  # bench/faults makes 1,000


def test_a_twentieth_of_all_steps_is_hit(tmp_path):
    hit = storm.run(tmp_path / "hit", STEPS, 0.05)
    assert hit["fired"] >= 0.03 * STEPS and hit["state"] == "done" and hit["number"] == STEPS and hit["whole"] and 0.9 * STEPS < hit["taken"] < STEPS, hit
    clean = [storm.run(tmp_path / f"clean{seed}", hit["taken"], seed=seed) for seed in range(3)]
    assert hit["loss"] < 1.5 * max(c["loss"] for c in clean), (hit, clean)


def test_no_false_alarm(tmp_path):
    for seed in range(5):
        calm = storm.run(tmp_path / f"calm{seed}", CLEAN, seed=seed)
        assert not calm["events"] and calm["taken"] == CLEAN and calm["state"] == "done", calm
