//! Clones by turns in the volume of the first sample and in that of the last.
//!
//! A machine wanders between speeds within seconds, so the times of a clone in round 100 and in
//! round 10,000 cannot be compared when minutes lie between. Therefore images of the device are
//! kept of both, and the two histories go on beside each other, each from its own round:
//!
//! ```text
//! repetition   open both images; warm | warm; early | late; late | early; early | late; ... check both
//! turn         clone and edit, so many rounds as lie between two checkpoints; checkpoint
//! ```
//!
//! A turn takes some hundredths of a second, and is compared with the other one's beside it. It
//! ends with the checkpoint, so a history does its background work in its own turns, except for the
//! compacted copy of the last node. Each repetition starts from the images again, so the early
//! history stays early, with any number of measured clones. Both images were taken after the same
//! checkpoints, are opened with the same options, and have nothing cached. The history that is
//! opened first, and the one that goes first, change.

use std::sync::Arc;

use ramet_betree::{StructuralPath, Tree};
use rustix::time::ClockId;

use super::history::{Cloned, Rounds, clock_ns, median_of};
use crate::SparseDevice;
use crate::scale::measure::settled_bytes;

/// Figures of one history in one repetition.
#[derive(Clone, Debug)]
pub struct Turns {
    /// Rounds done before.
    pub round: u32,
    /// Nodes and segments that one clone went through, mean.
    pub clone_visits: f64,
    /// Processor time of one clone in the thread that asks for it, median, in nanoseconds.
    pub clone_cpu_ns: u64,
    /// The same, mean of the middle half.
    pub clone_cpu_ns_middle: f64,
    /// The same, median of each turn.
    pub turn_cpu_ns: Vec<u64>,
    /// Time of one clone, median, in nanoseconds.
    pub clone_ns: u64,
    /// Processor time of all other threads for one round, mean, in nanoseconds. Work that one
    /// history leaves undone at the end of its turn counts as the other's.
    pub background_ns: u64,
    /// Clones that had to wait for something to be done first.
    pub clone_waits: u64,
    /// Nodes put in order for the clones to come.
    pub compacted_copies: u64,
}

/// A volume as it was after some rounds.
pub(super) struct Kept {
    round: u32,
    image: SparseDevice,
}

impl Kept {
    /// Keeps the bytes of `device` when all of `tree` is on it and no work waits.
    pub(super) fn after(round: u32, tree: &Tree, device: &SparseDevice) -> Self {
        settled_bytes(tree);
        let image = device.image();
        Self { round, image }
    }
}

/// One history that goes on.
struct History {
    tree: Tree,
    start: u32,
    done: u32,
    clones: Vec<Cloned>,
    turn_cpu_ns: Vec<u64>,
    background_ns: u64,
}

impl History {
    fn open(rounds: &Rounds, kept: &Kept) -> Self {
        let device = Arc::new(kept.image.image());
        let tree = Tree::open(device, rounds.options()).expect("the image opens");
        settled_bytes(&tree);
        Self {
            tree,
            start: kept.round,
            done: kept.round,
            clones: Vec::new(),
            turn_cpu_ns: Vec::new(),
            background_ns: 0,
        }
    }

    fn turn(&mut self, rounds: &Rounds) {
        let others = || clock_ns(ClockId::ProcessCPUTime) - clock_ns(ClockId::ThreadCPUTime);
        let before = others();
        for _ in 0..rounds.checkpoint_every {
            self.done += 1;
            self.clones.push(rounds.play(&self.tree, self.done));
        }
        self.tree.checkpoint().expect("checkpoint");
        let turn = self.clones.len() - rounds.checkpoint_every as usize;
        let median_ns = median_of(&mut self.clones[turn..], |clone| clone.cpu_ns);
        self.turn_cpu_ns.push(median_ns);
        // The two clocks are not read at once: where nothing else runs, that can be less than
        // before.
        self.background_ns += others().saturating_sub(before);
    }

    /// Forgets the figures from while caches filled.
    fn start_measuring(&mut self) {
        self.clones.clear();
        self.turn_cpu_ns.clear();
        self.background_ns = 0;
    }

    /// The costs of its clones, after a look at the first and the last version that it made and at
    /// the newest.
    fn finish(mut self, rounds: &Rounds) -> Turns {
        let paths = self.tree.stats().paths;
        let newest = rounds.newest(self.done);
        for version in [self.start + 1, self.done, newest] {
            rounds.verify(&self.tree, version, self.done);
        }
        let violations = self.tree.verify(&mut |_| {}).expect("verify");
        assert!(violations.is_empty(), "{violations:?}");
        self.tree.close().expect("close");
        let clones = self.clones.len() as u64;
        let visits: u64 = self.clones.iter().map(|clone| clone.visits).sum();
        let clone_cpu_ns = median_of(&mut self.clones, |clone| clone.cpu_ns);
        let middle = &self.clones[self.clones.len() / 4..self.clones.len() * 3 / 4];
        let middle_ns: u64 = middle.iter().map(|clone| clone.cpu_ns).sum();
        Turns {
            round: self.start,
            clone_visits: visits as f64 / clones as f64,
            clone_cpu_ns,
            clone_cpu_ns_middle: middle_ns as f64 / middle.len() as f64,
            turn_cpu_ns: self.turn_cpu_ns,
            clone_ns: median_of(&mut self.clones, |clone| clone.ns),
            background_ns: self.background_ns / clones,
            clone_waits: paths[StructuralPath::CloneWaits],
            compacted_copies: paths[StructuralPath::CompactedCopies],
        }
    }
}

impl Rounds {
    /// Goes on by turns in both volumes once.
    pub(super) fn by_turns(&self, kept: &[Kept; 2], repetition: u32) -> [Turns; 2] {
        let order = |turn: u32| {
            if turn.is_multiple_of(2) {
                [0, 1]
            } else {
                [1, 0]
            }
        };
        let mut opened = order(repetition).map(|which| History::open(self, &kept[which]));
        opened.iter_mut().for_each(|history| {
            history.turn(self);
            history.start_measuring();
        });
        for turn in 0..self.turns {
            for which in order(turn) {
                opened[which].turn(self);
            }
        }
        let [a, b] = opened.map(|history| history.finish(self));
        if repetition.is_multiple_of(2) {
            [a, b]
        } else {
            [b, a]
        }
    }
}
