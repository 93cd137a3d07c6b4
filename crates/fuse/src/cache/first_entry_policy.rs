//! Programs that look whether a directory has anything in it before they read it.
//!
//! `rm -r` opens each directory twice: once for its first name, and again to read it. All names of the first answer but
//! that one are for nothing, since the second one has them again. The kernel does not say what a directory is opened for.
//! So who closed some directories, one after the other, behind one answer each gets a short one when it opens another, and
//! all when it comes back to that. If it reads on instead it has asked once more than it had to, and gets whole answers again.
//!
//! Only where all answers come with attributes: a kernel that is free to go on without them would miss those of the rest.

use parking_lot::Mutex;
use ramet_fs::Ino;

/// Askers that are known at the same time, at most; the number of an asker says where, and who comes later is known instead.
const ASKERS: usize = 64;
/// Open directories that are known, at most, as with askers.
const OPENED: usize = 64;
/// Directories that somebody closed behind one answer before it gets a short one.
const PROOF: u8 = 3;
/// `.` and `..`.
const DOTS: usize = 2;
/// Entries of a short answer.
pub(crate) const SHORT: usize = DOTS + 1;

/// Of a mount.
pub(crate) struct FirstEntryPolicy(Mutex<State>);

struct State {
    askers: [Habit; ASKERS],
    opened: [Opened; OPENED],
}

/// Of a thread that opens directories.
#[derive(Clone, Copy, Default)]
struct Habit {
    /// Its number, 0 if there is none.
    asker: u32,
    /// Directories that it closed behind one answer since it last read one that it had not looked into first.
    glances: u8,
    /// The last of these, and the number it was open as.
    dir: u64,
    fh: u64,
}

/// A directory that one answer was given of.
#[derive(Clone, Copy, Default)]
struct Opened {
    /// Number of the open directory, 0 if there is none.
    fh: u64,
    asker: u32,
    dir: u64,
}

impl State {
    fn habit(&mut self, asker: u32) -> &mut Habit {
        let at = &mut self.askers[usize::try_from(asker).expect("32 bits") % ASKERS];
        if at.asker != asker {
            *at = Habit {
                asker,
                ..Habit::default()
            };
        }
        at
    }

    /// Whether the thread `asker` looked into `dir` last. That it closed it may be heard of after it opened it again.
    fn has_looked_into(&mut self, asker: u32, dir: u64) -> bool {
        let is_there = |opened: &Opened| opened.asker == asker && opened.dir == dir;
        self.habit(asker).dir == dir || self.opened.iter().any(is_there)
    }

    /// Where an open directory is if it is known.
    fn opened(&mut self, fh: u64) -> &mut Opened {
        let at = usize::try_from(fh % OPENED as u64).expect("a small number");
        &mut self.opened[at]
    }

    /// The open directory, if one answer was given of it.
    fn take(&mut self, fh: u64) -> Option<Opened> {
        let opened = self.opened(fh);
        (opened.fh == fh).then(|| std::mem::take(opened))
    }
}

impl Default for FirstEntryPolicy {
    fn default() -> Self {
        Self(Mutex::new(State {
            askers: [Habit::default(); ASKERS],
            opened: [Opened::default(); OPENED],
        }))
    }
}

impl FirstEntryPolicy {
    /// Whether the thread `asker`, which begins to read `dir`, likely wants no more than its first name.
    pub(crate) fn wants_first_only(&self, asker: u32, dir: Ino) -> bool {
        let mut state = self.0.lock();
        state.habit(asker).glances >= PROOF && !state.has_looked_into(asker, dir.0)
    }

    /// The thread `asker` got so many entries of `dir`, open as `fh`, and may ask for more.
    pub(crate) fn began(&self, asker: u32, dir: Ino, fh: u64, entries: usize) {
        // Who finds nothing asks once more, to hear that it is all.
        if entries > DOTS {
            *self.0.lock().opened(fh) = Opened {
                fh,
                asker,
                dir: dir.0,
            };
        }
    }

    /// Somebody asks for more of the open directory `fh`.
    pub(crate) fn goes_on(&self, fh: u64) {
        let mut state = self.0.lock();
        if let Some(opened) = state.take(fh)
            && !state.has_looked_into(opened.asker, opened.dir)
        {
            state.habit(opened.asker).glances = 0;
        }
    }

    /// The open directory `fh` is closed.
    pub(crate) fn closed(&self, fh: u64) {
        let mut state = self.0.lock();
        if let Some(opened) = state.take(fh) {
            let habit = state.habit(opened.asker);
            habit.glances = habit.glances.saturating_add(1);
            // Of what was closed before, it may be heard later.
            if opened.fh > habit.fh {
                (habit.dir, habit.fh) = (opened.dir, opened.fh);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RM: u32 = 7;

    /// Opens as `rm -r` does; whether the first answer, and the second, are short.
    fn looks_and_reads(
        glances: &FirstEntryPolicy,
        asker: u32,
        dir: u64,
        entries: usize,
    ) -> [bool; 2] {
        let dir = Ino(dir);
        let (first, second) = (2 * dir.0, 2 * dir.0 + 1);
        let is_first_short = glances.wants_first_only(asker, dir);
        let entries_first = if is_first_short {
            SHORT.min(entries)
        } else {
            entries
        };
        glances.began(asker, dir, first, entries_first);
        if entries <= DOTS {
            glances.goes_on(first);
        }
        glances.closed(first);
        let is_second_short = glances.wants_first_only(asker, dir);
        glances.began(asker, dir, second, entries);
        glances.goes_on(second);
        glances.closed(second);
        [is_first_short, is_second_short]
    }

    fn reads(glances: &FirstEntryPolicy, asker: u32, dir: u64) -> bool {
        let fh = 1000 + dir;
        let is_short = glances.wants_first_only(asker, Ino(dir));
        glances.began(asker, Ino(dir), fh, 10);
        glances.goes_on(fh);
        glances.goes_on(fh);
        glances.closed(fh);
        is_short
    }

    #[test]
    fn who_only_looks_gets_little_and_who_reads_all() {
        let glances = FirstEntryPolicy::default();
        for dir in 1..20 {
            let is_known = dir > u64::from(PROOF);
            assert_eq!(looks_and_reads(&glances, RM, dir, 12), [is_known, false]);
            assert!(!reads(&glances, RM + 1, dir), "another thread");
        }
    }

    #[test]
    fn empty_directories_do_not_tell() {
        let glances = FirstEntryPolicy::default();
        for dir in 1..20 {
            let entries = if dir % 2 == 0 { DOTS } else { 12 };
            let is_known = dir > 2 * u64::from(PROOF) - 1;
            assert_eq!(looks_and_reads(&glances, RM, dir, entries)[0], is_known);
        }
    }

    #[test]
    fn who_reads_on_gets_all_from_then_on() {
        let glances = FirstEntryPolicy::default();
        for dir in 1..=u64::from(PROOF) {
            looks_and_reads(&glances, RM, dir, 12);
        }
        assert!(reads(&glances, RM, 50));
        assert!(!reads(&glances, RM, 51));
        let [first, _] = looks_and_reads(&glances, RM, 52, 12);
        assert!(!first, "it has to be seen again");
    }

    #[test]
    fn who_comes_back_before_it_is_known_that_it_left_gets_all() {
        let glances = FirstEntryPolicy::default();
        for dir in 1..=u64::from(PROOF) {
            looks_and_reads(&glances, RM, dir, 12);
        }
        let dir = Ino(50);
        assert!(glances.wants_first_only(RM, dir));
        glances.began(RM, dir, 100, SHORT);
        assert!(!glances.wants_first_only(RM, dir));
        glances.began(RM, dir, 101, 12);
        glances.goes_on(101);
        glances.closed(100);
        assert!(!glances.wants_first_only(RM, dir));
        assert!(glances.wants_first_only(RM, Ino(51)), "still known");
        // Nor does it matter when it is known later still.
        glances.began(RM, dir, 102, SHORT);
        glances.began(RM, Ino(51), 103, SHORT);
        glances.closed(103);
        glances.closed(102);
        glances.began(RM, Ino(51), 104, 12);
        glances.goes_on(104);
        assert!(glances.wants_first_only(RM, Ino(52)));
    }

    #[test]
    fn who_comes_later_begins_anew() {
        let glances = FirstEntryPolicy::default();
        for dir in 1..=u64::from(PROOF) {
            looks_and_reads(&glances, RM, dir, 12);
        }
        let same_place = RM + u32::try_from(ASKERS).unwrap();
        assert!(!reads(&glances, same_place, 50));
        assert!(!reads(&glances, RM, 51), "forgotten");
    }
}
