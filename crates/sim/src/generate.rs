//! Random steps that make ranges meet.
//!
//! Keys are short strings over a few bytes, 0x00 and 0xff among them, so that prefixes nest, ranges
//! overlap in every way and successors of prefixes carry. Half of the keys are taken from the keys
//! of the tree. Clones may take any range to any place: into itself, over itself, the whole key
//! space.

use bytes::Bytes;
use ramet_betree::successor_of_prefix;

use crate::{Change, Fill, Model, Rng, Step};

const ALPHABET: [u8; 5] = [0x00, 0x01, b'a', b'b', 0xff];
const KEY_BYTES_MAX: usize = 160;

/// The shares of the kinds of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Every second change is structural, and the whole tree is compared often: short histories
    /// that fail soon.
    Dense,
    /// Most changes are points in batches, and a few keys behind each structural change are
    /// compared at once; the whole tree is compared, closed and crashed at intervals: many
    /// operations in little time.
    Long,
}

/// Makes the next step from the state that the steps before left.
#[derive(Clone, Debug)]
pub struct Generator {
    rng: Rng,
    /// Above this many keys, a clone or put gives way to a deletion.
    keys_max: usize,
    salt: u32,
    mix: Mix,
    /// Range that the last structural change left to be looked at.
    changed_at: Option<Bytes>,
}

impl Generator {
    /// The history of `seed`, in a key space of about `keys_max` keys.
    #[must_use]
    pub fn new(seed: u64, keys_max: usize, mix: Mix) -> Self {
        Self {
            mix,
            changed_at: None,
            rng: Rng::new(seed),
            keys_max,
            salt: 0,
        }
    }

    /// The next step.
    pub fn step(&mut self, model: &Model) -> Step {
        match self.mix {
            Mix::Dense => self.dense_step(model),
            Mix::Long => self.long_step(model),
        }
    }

    fn long_step(&mut self, model: &Model) -> Step {
        if let Some(lo) = self.changed_at.take() {
            let limit = 1 + self.rng.below(6);
            return Step::Scan {
                lo,
                hi: None,
                limit,
            };
        }
        match self.rng.below(20_000) {
            0..14_000 => {
                let changes = self.changes(model);
                self.changed_at = changes.iter().rev().find_map(|c| Some(c.replaced()?.0));
                Step::Apply(changes)
            }
            14_000..19_000 => Step::Get(self.key(model)),
            19_000..19_960 => {
                let (lo, hi) = self.range(model);
                Step::Scan {
                    lo,
                    hi,
                    limit: self.rng.below(12),
                }
            }
            19_960..19_968 => Step::ScanAll,
            19_968..19_976 => Step::Snapshot,
            19_976..19_984 => Step::VerifySnapshot,
            19_984..19_990 => Step::Sync,
            19_990..19_994 => Step::Checkpoint,
            19_994..19_997 => Step::Reopen,
            _ => Step::Crash,
        }
    }

    fn dense_step(&mut self, model: &Model) -> Step {
        match self.rng.below(1000) {
            0..600 => self.apply(model),
            600..860 => Step::Get(self.key(model)),
            860..960 => {
                let (lo, hi) = self.range(model);
                Step::Scan {
                    lo,
                    hi,
                    limit: self.rng.below(40),
                }
            }
            960..964 => Step::ScanAll,
            964..974 => Step::Snapshot,
            974..984 => Step::VerifySnapshot,
            984..992 => Step::Sync,
            992..997 => Step::Checkpoint,
            997..999 => Step::Reopen,
            _ => Step::Crash,
        }
    }

    fn apply(&mut self, model: &Model) -> Step {
        Step::Apply(self.changes(model))
    }

    /// The changes of the next batch.
    pub fn changes(&mut self, model: &Model) -> Vec<Change> {
        let (one_in, most) = match self.mix {
            Mix::Dense => (6, 8),
            Mix::Long => (3, 24),
        };
        let count = if self.rng.one_in(one_in) {
            1 + self.rng.below(most)
        } else {
            1
        };
        if count == 1 {
            return vec![self.change(model)];
        }
        // Later changes of a batch see the earlier ones, and so must the generator, which keeps the
        // key space in bounds.
        let mut state = model.clone();
        let changes = (0..count).map(|_| {
            let change = self.change(&state);
            state.change(&change);
            change
        });
        changes.collect()
    }

    /// A change that leaves something to work with: one that takes away a large part of the keys is
    /// drawn again, except now and then.
    fn change(&mut self, model: &Model) -> Change {
        let is_full = model.len() > self.keys_max;
        let part = if is_full { 2 } else { 8 };
        for _ in 0..6 {
            let change = if is_full {
                self.deletion(model)
            } else {
                self.any_change(model)
            };
            let (removed, added) = effect(model, &change);
            let loses = removed.saturating_sub(added);
            let grows = added.saturating_sub(removed);
            let fits = model.len() + grows <= self.keys_max + self.keys_max / 2
                && key_bytes_max(model, &change) <= KEY_BYTES_MAX;
            if fits && (loses <= 2 + model.len() / part || self.rng.one_in(200)) {
                return change;
            }
        }
        Change::Put {
            key: self.key(model),
            value: self.fill(300),
        }
    }

    fn any_change(&mut self, model: &Model) -> Change {
        // The last quarter is structural.
        let drawn = match self.mix {
            Mix::Long if !self.rng.one_in(5) => self.rng.below(75),
            _ => self.rng.below(100),
        };
        match drawn {
            0..50 => Change::Put {
                key: self.key(model),
                value: self.fill(300),
            },
            50..58 => Change::Delete {
                key: self.key(model),
            },
            58..75 => {
                let offset = u32::try_from(self.rng.below(400)).expect("small");
                Change::Patch {
                    key: self.key(model),
                    offset,
                    bytes: Fill {
                        len: 1 + u16::try_from(self.rng.below(50)).expect("small"),
                        salt: offset,
                    },
                }
            }
            75..80 => self.deletion(model),
            80..87 => self.ingest(model),
            _ => self.clone(model),
        }
    }

    fn deletion(&mut self, model: &Model) -> Change {
        if self.rng.one_in(2) {
            return Change::DeletePrefix {
                prefix: self.prefix(model),
            };
        }
        let (lo, hi) = self.range(model);
        Change::DeleteRange { lo, hi }
    }

    fn clone(&mut self, model: &Model) -> Change {
        let dst = self.prefix(model);
        let lifted = self.prefix(model);
        if self.rng.one_in(2) {
            return Change::ClonePrefix { src: lifted, dst };
        }
        if self.rng.one_in(3) {
            return self.clone_of_numbers(model);
        }
        let (lo, hi) = (self.below(&lifted), self.below(&lifted));
        let (lo, hi) = if lo <= hi { (lo, hi) } else { (hi, lo) };
        let is_open = self.rng.one_in(4);
        let hi = if is_open {
            successor_of_prefix(&lifted)
        } else {
            Some(hi)
        };
        let strip = u32::try_from(lifted.len()).expect("keys are short");
        Change::CloneRange {
            lo,
            hi,
            strip,
            prefix: dst,
        }
    }

    /// Numbers from near that at the end of one key to near that of another.
    fn clone_of_numbers(&mut self, model: &Model) -> Change {
        let width = 1 + self.rng.below(3);
        let mut place = || {
            let mut key = self.key(model).to_vec();
            key.resize(key.len().max(width), 0);
            let digits = key.split_off(key.len() - width);
            let number = digits
                .iter()
                .fold(0, |sum, &byte| sum << 8 | u64::from(byte));
            (Bytes::from(key), number)
        };
        let ((from, near), (other, there)) = (place(), place());
        let to = if self.rng.one_in(3) {
            from.clone()
        } else {
            other
        };
        let most = 1u64 << (8 * width);
        let mut about = |number: u64| {
            let reach = [2, 300, most][self.rng.below(3)];
            let off = self.rng.below(usize::try_from(reach).expect("small")) as u64;
            number.saturating_sub(off)
        };
        let (start, first) = (about(near), about(there));
        let count = (1 + about(2 * most)).min(most - start.max(first));
        let numbers = match self.rng.below(20) {
            // No number, at the end of all or backwards.
            0 => (most, most),
            1 => (start, start.saturating_sub(count)),
            _ => (start, start + count),
        };
        Change::CloneNumbers {
            from,
            numbers,
            to,
            first,
            width: u8::try_from(width).expect("small"),
        }
    }

    /// Some entries for a range that starts with a prefix, often so many that they take several
    /// leaves.
    pub(crate) fn ingest(&mut self, model: &Model) -> Change {
        let prefix = self.prefix(model);
        let (lo, hi) = (self.below(b""), self.below(b""));
        let (lo, hi) = (lo.clone().min(hi.clone()), lo.max(hi));
        let hi = (!self.rng.one_in(4)).then_some(hi);
        let count_max = if self.rng.one_in(3) { 60 } else { 8 };
        let count = self.rng.below(count_max);
        let mut keys: Vec<Bytes> = (0..count).map(|_| self.below(&lo)).collect();
        keys.retain(|key| *key >= lo && hi.as_ref().is_none_or(|hi| key < hi));
        keys.sort_unstable();
        keys.dedup();
        let entries = keys.into_iter().map(|key| (key, self.fill(300)));
        Change::Ingest {
            prefix,
            lo,
            hi,
            entries: entries.collect(),
        }
    }

    fn fill(&mut self, len_max: usize) -> Fill {
        self.salt += 1;
        let len = if self.rng.one_in(12) {
            0
        } else {
            self.rng.below(len_max + 1)
        };
        Fill {
            len: u16::try_from(len).expect("values are short"),
            salt: self.salt,
        }
    }

    fn letters(&mut self, len: usize) -> Vec<u8> {
        (0..len)
            .map(|_| ALPHABET[self.rng.below(ALPHABET.len())])
            .collect()
    }

    fn existing(&mut self, model: &Model) -> Option<Bytes> {
        let len = self.rng.below(8);
        let probe = self.letters(len);
        model.key_near(&probe).cloned()
    }

    fn key(&mut self, model: &Model) -> Bytes {
        if self.rng.one_in(2)
            && let Some(key) = self.existing(model)
        {
            return key;
        }
        let len = self.rng.below(9);
        let mut key = self.letters(len);
        if self.rng.one_in(20) {
            key.resize(key.len() + 60, b'z');
        }
        key.into()
    }

    /// A short string, often the beginning of a key that is there, seldom empty.
    fn prefix(&mut self, model: &Model) -> Bytes {
        if self.rng.one_in(3)
            && let Some(key) = self.existing(model)
        {
            let len = self.rng.below(key.len() + 1);
            return if len == 0 { key } else { key.slice(..len) };
        }
        let len = if self.rng.one_in(30) {
            0
        } else {
            1 + self.rng.below(5)
        };
        self.letters(len).into()
    }

    fn below(&mut self, prefix: &[u8]) -> Bytes {
        let len = self.rng.below(4);
        [prefix, &self.letters(len)].concat().into()
    }

    fn range(&mut self, model: &Model) -> (Bytes, Option<Bytes>) {
        let (one, other) = (self.key(model), self.key(model));
        match self.rng.below(10) {
            0 => (one, None),
            1 => (Bytes::new(), Some(one)),
            // Empty or backwards, now and then.
            2 => (one, Some(other)),
            _ => (one.clone().min(other.clone()), Some(one.max(other))),
        }
    }
}

/// How many keys a change of a range takes away, and how many it adds. Point changes count nothing.
fn effect(model: &Model, change: &Change) -> (usize, usize) {
    let count = |(lo, hi): (Bytes, Option<Bytes>)| model.range(&lo, hi.as_deref()).count();
    let added = change.source().map_or(0, count) + change.added().count();
    (change.replaced().map_or(0, count), added)
}

/// The longest key that a clone makes; 0 for other changes.
fn key_bytes_max(model: &Model, change: &Change) -> usize {
    let (Some((lo, hi)), Some((dst, _))) = (change.source(), change.replaced()) else {
        return 0;
    };
    let grows = dst.len().saturating_sub(lo.len());
    model
        .range(&lo, hi.as_deref())
        .map(|(key, _)| key.len() + grows)
        .max()
        .unwrap_or(0)
}
