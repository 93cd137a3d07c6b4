//! Random histories, and how a failing one is made short enough to read.

use std::time::{Duration, Instant};

use crate::{Generator, Mix, Report, Runner, Setup, Step, run_steps};

/// Runs `ops` random steps of `seed`. When one fails, the history is made shorter for up to
/// `patience` and told in the error, with the seed.
///
/// # Errors
/// A text for people: the failure, and the shortest history found that fails.
pub fn run_random(
    setup: &Setup,
    seed: u64,
    ops: usize,
    keys_max: usize,
    mix: Mix,
    patience: Duration,
) -> Result<Report, String> {
    let mut generator = Generator::new(seed, keys_max, mix);
    let mut runner =
        Runner::new(setup.clone()).map_err(|detail| format!("seed {seed}: {detail}"))?;
    let mut steps = Vec::new();
    for index in 0..=ops {
        let step = if index == ops {
            Step::ScanAll
        } else {
            generator.step(runner.model())
        };
        steps.push(step);
        if let Err(detail) = runner.step(&steps[index]) {
            let first = format!("seed {seed}, step {index} ({:?}): {detail}", steps[index]);
            eprintln!("{first}\nmaking the history shorter ...");
            drop(runner);
            let (shortest, again) = shrink(setup, steps, patience);
            let again = again.unwrap_or_else(|| "it does not fail when run again".to_owned());
            let list: Vec<String> = shortest.iter().map(|step| format!("  {step:?}")).collect();
            return Err(format!(
                "{first}\n{} steps are enough ({again}):\n{}",
                shortest.len(),
                list.join("\n")
            ));
        }
    }
    Ok(runner.report())
}

/// Leaves out parts of a failing history, halves first and single steps last, then changes of
/// batches, as long as the rest still fails. Returns the shortest history that failed, with its
/// failure; no failure when already the whole history does not fail again.
#[must_use]
pub fn shrink(
    setup: &Setup,
    mut steps: Vec<Step>,
    patience: Duration,
) -> (Vec<Step>, Option<String>) {
    let until = Instant::now() + patience;
    let Err(failure) = run_steps(setup, &steps) else {
        return (steps, None);
    };
    steps.truncate(failure.step + 1);
    let mut detail = failure.detail;
    let mut part = steps.len().div_ceil(2);
    while Instant::now() < until {
        let before = steps.len();
        let mut start = 0;
        while start < steps.len() && Instant::now() < until {
            let end = (start + part).min(steps.len());
            let rest = [&steps[..start], &steps[end..]].concat();
            if let Err(failure) = run_steps(setup, &rest) {
                steps = rest;
                steps.truncate(failure.step + 1);
                detail = failure.detail;
            } else {
                start = end;
            }
        }
        if part > 1 {
            part = part.div_ceil(2);
        } else if steps.len() == before && !shrink_batches(setup, &mut steps, &mut detail, until) {
            break;
        }
    }
    (steps, Some(detail))
}

/// Leaves out single changes of batches. Says whether one could go.
fn shrink_batches(
    setup: &Setup,
    steps: &mut Vec<Step>,
    detail: &mut String,
    until: Instant,
) -> bool {
    let mut smaller = false;
    let mut index = 0;
    while index < steps.len() {
        let count = match &steps[index] {
            Step::Apply(changes) if changes.len() > 1 => changes.len(),
            _ => 0,
        };
        for leave_out in (0..count).rev() {
            let mut attempt = steps.clone();
            if let Some(Step::Apply(changes)) = attempt.get_mut(index)
                && changes.len() > 1
                && Instant::now() < until
            {
                changes.remove(leave_out);
                if let Err(failure) = run_steps(setup, &attempt) {
                    attempt.truncate(failure.step + 1);
                    *steps = attempt;
                    *detail = failure.detail;
                    smaller = true;
                }
            }
        }
        index += 1;
    }
    smaller
}
