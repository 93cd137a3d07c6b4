//! What programs do with the directories that they read.
//!
//! The attributes that come with an entry spare a request if somebody asks for them, and cost several times the entry if nobody does: `find` by
//! name wants none but those of directories, `grep -r` and `du` want all. The kernel says nothing when it has what it is
//! asked for. So after some answers an asker misses the attributes of a file here and there. If it looks one up, or another thread does in a directory that it
//! read, it gets all attributes from then on, and if nobody looks up any of many, those of directories only, until somebody does.

use std::sync::atomic::{AtomicU64, Ordering};

use ramet_fs::{Ino, Kind};

/// Askers that are known at the same time, at most; the number of an asker says where, and who comes later is known instead.
const ASKERS: usize = 64;
/// Answers with all attributes: short programs miss none.
const FULL: u8 = 8;
/// Answers behind those that some are missing from.
const PROBES: u8 = 16;
/// Files without attributes in each of these.
const MISSING: u32 = 2;

/// Directories whose last reader is known, at most, as with askers.
const READ: usize = 64;

/// Of the askers of a mount.
pub(crate) struct ReaddirplusPolicy {
    askers: [AtomicU64; ASKERS],
    /// Who missed attributes in a directory last: half of the number of the directory, and the asker.
    read: [AtomicU64; READ],
}

/// Of one: a thread that read directories.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Habit {
    /// Its number, 0 if there is none.
    asker: u32,
    /// Answers that it got, counted up to those that tell.
    answers: u8,
    /// Whether it looked up a file whose attributes it may have missed.
    looks_up: bool,
}

/// Which attributes an answer has.
pub(crate) enum Choice {
    All,
    /// All but those of so many files.
    Most(u32),
    /// Those of directories.
    Directories,
}

impl Habit {
    fn of(asker: u32) -> Self {
        Self {
            asker,
            answers: 0,
            looks_up: false,
        }
    }

    fn unpack(bits: u64) -> Self {
        let [a, b, c, d, answers, looks_up, ..] = bits.to_le_bytes();
        Self {
            asker: u32::from_le_bytes([a, b, c, d]),
            answers,
            looks_up: looks_up != 0,
        }
    }

    fn pack(self) -> u64 {
        let [a, b, c, d] = self.asker.to_le_bytes();
        u64::from_le_bytes([a, b, c, d, self.answers, self.looks_up.into(), 0, 0])
    }
}

impl Choice {
    /// Whether the attributes of the next entry, which is of this kind, are to come with it.
    pub(crate) fn wants(&mut self, kind: Kind) -> bool {
        match self {
            _ if kind == Kind::Directory => true,
            Self::All | Self::Most(0) => true,
            Self::Most(missing) => {
                *missing -= 1;
                false
            }
            Self::Directories => false,
        }
    }
}

impl Default for ReaddirplusPolicy {
    fn default() -> Self {
        Self {
            askers: [const { AtomicU64::new(0) }; ASKERS],
            read: [const { AtomicU64::new(0) }; READ],
        }
    }
}

impl ReaddirplusPolicy {
    /// Where that of `asker` is, and what is there. Two threads that change it at the same time err about which attributes to give, no more.
    fn find(&self, asker: u32) -> (&AtomicU64, Habit) {
        let at = &self.askers[usize::try_from(asker).expect("32 bits") % ASKERS];
        (at, Habit::unpack(at.load(Ordering::Relaxed)))
    }

    /// Where the last reader of a directory is, and half of the number of the directory.
    fn last_reader(&self, dir: Ino) -> (&AtomicU64, u64) {
        let number = dir.0 & u64::from(u32::MAX);
        let at = usize::try_from(number).expect("32 bits") % READ;
        (&self.read[at], number << 32)
    }

    /// The thread `asker` reads `dir`, or goes on with it; which attributes it gets.
    pub(crate) fn lists(&self, asker: u32, dir: Ino) -> Choice {
        let (at, mut habit) = self.find(asker);
        if habit.asker != asker {
            habit = Habit::of(asker);
        }
        if habit.looks_up {
            return Choice::All;
        }
        if habit.answers >= FULL {
            let (reader, number) = self.last_reader(dir);
            reader.store(number | u64::from(asker), Ordering::Relaxed);
        }
        let choice = match habit.answers {
            ..FULL => Choice::All,
            FULL.. if habit.answers < FULL + PROBES => Choice::Most(MISSING),
            _ => return Choice::Directories,
        };
        habit.answers += 1;
        at.store(habit.pack(), Ordering::Relaxed);
        choice
    }

    /// The thread `asker` looked up a name in `dir`, and found something of this kind.
    pub(crate) fn looks_up(&self, asker: u32, dir: Ino, kind: Kind) {
        if kind == Kind::Directory {
            return;
        }
        self.misses(asker);
        let (reader, number) = self.last_reader(dir);
        let reader = reader.load(Ordering::Relaxed) ^ number;
        // Another directory leaves bits of its number.
        if let Ok(reader) = u32::try_from(reader)
            && reader != asker
        {
            self.misses(reader);
        }
    }

    /// The thread `asker` would have had a use for more attributes, if it misses any.
    fn misses(&self, asker: u32) {
        let (at, habit) = self.find(asker);
        let may_miss = habit.asker == asker && habit.answers > FULL;
        if may_miss && !habit.looks_up {
            let habit = Habit {
                looks_up: true,
                ..habit
            };
            at.store(habit.pack(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIND: u32 = 7;
    const DIR: Ino = Ino(1 << 40 | 5);
    const OTHER: Ino = Ino(6);

    /// Files without attributes in the next answer, of two files and a directory each time.
    fn missing(habits: &ReaddirplusPolicy, asker: u32, files: u32) -> u32 {
        let mut choice = habits.lists(asker, DIR);
        assert!(choice.wants(Kind::Directory));
        (0..files).filter(|_| !choice.wants(Kind::Regular)).count() as u32
    }

    fn list(habits: &ReaddirplusPolicy, asker: u32, answers: u8) {
        for _ in 0..answers {
            missing(habits, asker, 1);
        }
    }

    #[test]
    fn who_looks_up_nothing_gets_no_attributes_of_files() {
        let habits = ReaddirplusPolicy::default();
        for answer in 0..FULL + PROBES + 10 {
            let expected = match answer {
                ..FULL => 0,
                FULL.. if answer < FULL + PROBES => MISSING,
                _ => 100,
            };
            assert_eq!(missing(&habits, FIND, 100), expected, "answer {answer}");
        }
        // Somebody else is judged by what he does.
        habits.looks_up(FIND + 1, OTHER, Kind::Regular);
        assert_eq!(missing(&habits, FIND, 100), 100);
        assert_eq!(missing(&habits, FIND + 1, 100), 0);
        habits.looks_up(FIND, OTHER, Kind::Directory);
        assert_eq!(missing(&habits, FIND, 100), 100, "it had those");
        habits.looks_up(FIND, OTHER, Kind::Symlink);
        assert_eq!(missing(&habits, FIND, 100), 0);
    }

    #[test]
    fn who_misses_one_gets_all() {
        let habits = ReaddirplusPolicy::default();
        list(&habits, FIND, FULL);
        // It missed nothing: names of a command line.
        habits.looks_up(FIND, OTHER, Kind::Regular);
        assert_eq!(missing(&habits, FIND, 100), MISSING);
        habits.looks_up(FIND, OTHER, Kind::Regular);
        for _ in 0..1000 {
            assert_eq!(missing(&habits, FIND, 100), 0);
        }
    }

    #[test]
    fn who_reads_for_others_gets_all_when_they_look() {
        let habits = ReaddirplusPolicy::default();
        list(&habits, FIND, FULL + PROBES);
        let same_place = Ino(DIR.0 + READ as u64);
        habits.looks_up(FIND + 1, same_place, Kind::Regular);
        assert_eq!(missing(&habits, FIND, 100), 100, "not where it read");
        habits.looks_up(FIND + 1, DIR, Kind::Regular);
        assert_eq!(missing(&habits, FIND, 100), 0);
    }

    #[test]
    fn who_comes_later_begins_anew() {
        let habits = ReaddirplusPolicy::default();
        list(&habits, FIND, FULL + PROBES);
        let same_place = FIND + u32::try_from(ASKERS).unwrap();
        assert_eq!(missing(&habits, same_place, 100), 0);
        habits.looks_up(FIND, OTHER, Kind::Regular);
        assert_eq!(missing(&habits, FIND, 100), 0, "forgotten");
        list(&habits, FIND, FULL);
        assert_eq!(missing(&habits, FIND, 100), MISSING);
    }

    #[test]
    fn habits_survive_packing() {
        let habit = Habit {
            asker: u32::MAX - 1,
            answers: 24,
            looks_up: true,
        };
        assert!(Habit::unpack(habit.pack()) == habit);
        assert!(Habit::unpack(0) == Habit::of(0));
    }
}
