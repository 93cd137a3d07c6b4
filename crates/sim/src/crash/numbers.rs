//! Inode numbers that the states of a history showed.
//!
//! A number is given when it is first shown, in a batch of its own, and a look at a state shows all of
//! its numbers. So numbers are no part of a state: a crash may keep a state and lose the numbers that
//! it showed last. Two demands remain. A number that was durable is still that of its object. An
//! object that lost its number gets one that, with its generation, was never shown before: handles
//! must not lead to other objects.

use std::collections::HashSet;
use std::ops::Range;

/// Number and generation of each object, in the order of a walk.
pub(super) type Shown = Vec<(u64, u64)>;

/// The numbers that each version showed.
#[derive(Default)]
pub(super) struct Numbers(Vec<Shown>);

impl Numbers {
    /// Those of the first version.
    pub(super) fn of_first(shown: Shown) -> Self {
        Self(vec![shown])
    }

    /// Adds those of a version.
    pub(super) fn push(&mut self, shown: Shown) {
        self.0.push(shown);
    }

    /// Judges the numbers of a state that was found, with its digest, after a cut that allows these
    /// versions and left the numbers of the version `numbered` durable.
    pub(super) fn judge(
        &self,
        versions: &[u64],
        allowed: Range<usize>,
        numbered: usize,
        (digest, found): (u64, &Shown),
    ) -> Result<(), String> {
        let durable: HashSet<_> = self.0[numbered].iter().collect();
        let ever: HashSet<_> = self.0[..allowed.end].iter().flatten().collect();
        let mut wrong = Err("no version has this digest".to_owned());
        for version in allowed.rev().filter(|version| versions[*version] == digest) {
            let shown = &self.0[version];
            let mut pairs = shown.iter().zip(found);
            let bad = pairs.find(|(before, now)| {
                before != now && (durable.contains(before) || ever.contains(now))
            });
            match bad {
                None => return Ok(()),
                Some((before, now)) => {
                    let is_durable = durable.contains(before);
                    wrong = Err(format!(
                        "version {version}: {now:?} in place of {before:?}, durable: {is_durable}"
                    ));
                }
            }
        }
        wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_number_may_be_new_and_not_that_of_another() {
        let mut numbers = Numbers::of_first(vec![(8, 1)]);
        numbers.push(vec![(8, 1), (9, 1)]);
        numbers.push(vec![(8, 1), (9, 1), (16, 2)]);
        let versions = [0, 1, 2];
        let judge = |numbered, found: &[(u64, u64)]| {
            let found = found.to_vec();
            let judged = numbers.judge(&versions, 0..3, numbered, (1, &found));
            judged.is_ok()
        };
        assert!(judge(0, &[(8, 1), (9, 1)]));
        assert!(judge(0, &[(8, 1), (9, 7)]));
        assert!(!judge(0, &[(8, 7), (9, 1)]), "it was durable");
        assert!(!judge(1, &[(8, 1), (9, 7)]), "it was durable");
        assert!(!judge(0, &[(8, 1), (16, 2)]), "another had it");
    }
}
