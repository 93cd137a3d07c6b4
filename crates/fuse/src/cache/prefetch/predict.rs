//! A prediction of the files that a program reads next.
//!
//! A listing gives files in its order, and a program that reads them in the same order gets a
//! *window* of files ahead of it. The window grows with each marker that the program reaches, up to
//! [`WINDOW`], and a program that leaves a directory early begins the next one with a smaller
//! window. The files of a listing form *runs* of bounded length.

use std::collections::{HashMap, VecDeque};

use ramet_fs::Ino;

/// Largest file that is sent, in bytes.
pub(crate) const FILE_BYTES_MAX: u64 = 32 << 10;
/// Files in a window: the first window, and the largest.
pub(super) const WINDOW: std::ops::RangeInclusive<usize> = 8..=128;
/// Bytes in a window, at most.
const WINDOW_BYTES: u64 = 1 << 20;
/// A program that skips so many files, or goes back so far, still reads in order: several threads
/// may share the work.
const SKIP: usize = 8;
/// Files that a program asks for in order before any is sent.
const PROOF: usize = 3;
/// A shorter window has no marker.
const FEW: usize = 16;
/// Files between the program and its first window: the program reads these itself meanwhile.
const LEAD: usize = 2;
/// A program that is so few files behind the file being sent has caught up. From then on it would
/// wait idle for the page of each file, and the sender would wake it for each file.
const NEAR: usize = 2;
/// Files that are left to the program then. The distance is as large again when the program has
/// read them itself.
const GAP: usize = 8;
/// Files in remembered listings, at most. The oldest listing goes first.
pub(super) const FILES: usize = 1 << 17;
/// Runs that are remembered, at most, and files of one run. Further files of a listing begin
/// another run.
pub(super) const RUNS: usize = 64;
const RUN_FILES: usize = 1 << 12;
/// Stands for a directory in place of a size in bytes.
pub(super) const DIRECTORY: u64 = u64::MAX;
/// Threads that are known to read in order, at most. The id of a thread says its slot.
const READERS: usize = 64;

/// A listing: the number of a stream that reads a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Listing(pub(crate) u64);

/// A file of a run: the number of the run since the mount, and the index in the run.
pub(super) type Place = (u64, usize);

/// The files that programs are likely to read next.
pub(super) struct Prediction {
    /// Place of each candidate.
    candidates: HashMap<Ino, Place>,
    runs: VecDeque<Run>,
    /// Number of the first of `runs`.
    first_run: u64,
    /// Files of all runs.
    files: usize,
    /// Ids of threads, and the window of the run that each read last.
    readers: [(u32, usize); READERS],
}

/// The candidates of a listing, in its order, and the larger files and directories between them,
/// which are never sent.
struct Run {
    listing: Listing,
    /// The thread that lists. Other threads may read.
    thread: u32,
    files: Vec<(Ino, u64)>,
    /// Number of files that were asked for in order, up to [`PROOF`].
    proof: usize,
    /// Index of the furthest file that was asked for in order, and of the last one out of order.
    last: Option<usize>,
    jumped: Option<usize>,
    /// Index of the first file that is neither sent nor left out.
    next: usize,
    /// Index where sending ends for now.
    target: usize,
    /// The marker before `target`, or the larger file or directory at `target`.
    marker: Option<usize>,
    window: usize,
}

impl Default for Prediction {
    fn default() -> Self {
        Self {
            candidates: HashMap::new(),
            runs: VecDeque::new(),
            first_run: 0,
            files: 0,
            readers: [(0, 0); READERS],
        }
    }
}

impl Run {
    /// Moves the target a window ahead of `from`, at most to the next large file or directory: the
    /// device should deliver in the order in which the program reads. Answers whether there is a
    /// file to send.
    fn extend(&mut self, from: usize) -> bool {
        self.next = self.next.max(from);
        let mut bytes = 0;
        let in_window = |(_, size): &&(Ino, u64)| {
            let is_small = *size <= FILE_BYTES_MAX;
            bytes += if is_small { *size } else { 0 };
            is_small && bytes <= WINDOW_BYTES
        };
        let rest = self.files.get(self.next..).unwrap_or_default();
        let ahead = rest.iter().take(self.window).take_while(in_window).count();
        let target = self.next + ahead;
        let is_large = |(_, size): &(Ino, u64)| *size > FILE_BYTES_MAX;
        self.marker = if self.files.get(target).is_some_and(is_large) {
            Some(target)
        } else if target < self.files.len() {
            Some(self.next + ahead / 2)
        } else {
            // The run has no further files, but the request for its last file shows that the
            // program read the run. A short window needs no marker.
            (ahead >= FEW).then(|| target - 1)
        };
        let has_more = target > self.target.max(self.next);
        self.target = self.target.max(target);
        has_more && (ahead > 1 || self.marker != Some(self.next))
    }

    /// Whether the program, which asks for the file at `at`, has come to the marker, or no file was
    /// sent.
    fn has_caught_up(&self, at: usize) -> bool {
        self.target == 0 || self.marker.map_or(at >= self.target, |marker| at >= marker)
    }

    /// Whether the program, which asks for the file at `at`, goes through the files in order.
    fn is_in_order(&self, at: usize) -> bool {
        let reached = self.last.map_or(0, |last| last + 1);
        at + SKIP >= reached && at <= reached.max(self.next) + SKIP
    }
}

impl Prediction {
    /// The window of the run that a thread read last.
    pub(super) fn window_of(&mut self, reader: u32) -> &mut usize {
        let at = &mut self.readers[usize::try_from(reader).expect("32 bits") % READERS];
        if at.0 != reader {
            *at = (reader, 0);
        }
        &mut at.1
    }

    fn run(&mut self, number: u64) -> Option<&mut Run> {
        let at = usize::try_from(number.checked_sub(self.first_run)?).ok()?;
        self.runs.get_mut(at)
    }

    /// Number of the run of a listing. A listing that begins gets a new run.
    fn run_of(&mut self, listing: Listing, thread: u32) -> u64 {
        let goes_on = |run: &Run| run.listing == listing && run.files.len() < RUN_FILES;
        if let Some(at) = self.runs.iter().rposition(goes_on) {
            return self.first_run + at as u64;
        }
        if self.runs.iter().all(|run| run.listing != listing) {
            self.shrink_window(thread);
        }
        if self.runs.len() == RUNS {
            self.drop_oldest();
        }
        self.runs.push_back(Run {
            listing,
            thread,
            files: Vec::new(),
            proof: 0,
            last: None,
            jumped: None,
            next: 0,
            target: 0,
            marker: None,
            window: 0,
        });
        self.first_run + self.runs.len() as u64 - 1
    }

    /// A thread that leaves a directory before it came to the marker gets a smaller window in the
    /// next directory.
    fn shrink_window(&mut self, thread: u32) {
        let Some(run) = self.runs.iter().rfind(|run| run.thread == thread) else {
            return;
        };
        // A thread that lists the directory at the marker has come to the marker.
        let is_missed = |marker: usize| {
            let is_directory = run.files[marker].1 == DIRECTORY;
            run.last < Some(marker) && !is_directory
        };
        let divisor = match run.last {
            _ if run.target == 0 => 1,
            None => usize::MAX,
            Some(_) if run.marker.is_some_and(is_missed) => 4,
            Some(_) => 1,
        };
        let window = self.window_of(thread);
        *window /= divisor;
        if *window < *WINDOW.start() {
            *window = 0;
        }
    }

    fn drop_oldest(&mut self) {
        let Some(run) = self.runs.pop_front() else {
            return;
        };
        for (ino, _) in &run.files {
            if self
                .candidates
                .get(ino)
                .is_some_and(|(of, _)| *of == self.first_run)
            {
                self.candidates.remove(ino);
            }
        }
        self.files -= run.files.len();
        self.first_run += 1;
    }

    /// A thread asks for the file at `at` of a run. Answers whether there is a file to send.
    pub(super) fn read(&mut self, (number, at): Place, thread: u32) -> bool {
        let eager = *self.window_of(thread);
        let Some(run) = self.run(number) else {
            return false;
        };
        if !run.is_in_order(at) {
            let jumped = run.jumped.replace(at);
            if jumped.is_none_or(|jumped| at < jumped || at > jumped + SKIP) {
                return false;
            }
            // The order begins anew at this file.
            (run.window, run.proof, run.jumped) = (0, 1, None);
            (run.target, run.marker) = (0, None);
            run.last = Some(at);
            return false;
        }
        if run.last < Some(at) {
            run.proof = PROOF.min(run.proof + 1);
        }
        let begins = run.last.is_none();
        run.last = run.last.max(Some(at));
        if begins {
            run.window = run.window.max(eager);
        } else if run.has_caught_up(at) && (run.window > 0 || run.proof == PROOF) {
            run.window = (2 * run.window).clamp(*WINDOW.start(), *WINDOW.end());
        }
        let window = run.window;
        // A large file takes a while to read. The files behind it are sent when the program asks
        // for one of them.
        let is_large = run.files[at].1 > FILE_BYTES_MAX;
        let goes_on = window > 0 && run.has_caught_up(at) && !is_large;
        let lead = match run.target {
            0 => LEAD,
            // The earlier window is still being sent.
            _ if run.next < run.target && run.next <= at + 1 + NEAR => GAP,
            _ => 0,
        };
        let sends = goes_on && run.extend(at + 1 + lead);
        if !begins && window > 0 {
            *self.window_of(thread) = window;
        }
        sends
    }

    /// Adds a file or [`DIRECTORY`] to a listing. The file becomes a candidate if `may_send`.
    pub(super) fn add(&mut self, listing: Listing, thread: u32, file: (Ino, u64), may_send: bool) {
        while self.files >= FILES {
            self.drop_oldest();
        }
        let number = self.run_of(listing, thread);
        let is_directory = file.1 == DIRECTORY;
        if let Some(run) = self.run(number)
            && !(is_directory && run.files.last() == Some(&file))
        {
            let at = run.files.len();
            run.files.push(file);
            self.files += 1;
            if !is_directory && may_send {
                self.candidates.insert(file.0, (number, at));
            }
        }
    }

    /// A listing goes on. Answers the run to send, if its reader is known to read in order.
    pub(super) fn continue_listing(&mut self, listing: Listing, thread: u32) -> Option<u64> {
        let eager = *self.window_of(thread);
        // The first run of the listing.
        let at = self.runs.iter().position(|run| run.listing == listing)?;
        let number = self.first_run + at as u64;
        let run = &mut self.runs[at];
        let begins_large = run
            .files
            .first()
            .is_some_and(|(_, size)| *size > FILE_BYTES_MAX);
        if eager == 0 || run.target > 0 || run.last.is_some() || begins_large {
            return None;
        }
        run.window = eager;
        // The program asks for the first file at once.
        run.extend(1).then_some(number)
    }

    /// The next file of a run that is to be sent, its bytes, and its index.
    pub(super) fn next(&mut self, number: u64) -> Option<(Ino, u64, usize)> {
        loop {
            let run = self.run(number)?;
            // The program may be further already.
            run.next = run.next.max(run.last.map_or(0, |last| last + 1));
            if run.next >= run.target {
                return None;
            }
            let (at, (ino, size)) = (run.next, run.files[run.next]);
            run.next += 1;
            let is_left = Some(at) == run.marker || size > FILE_BYTES_MAX;
            if !is_left && self.candidates.get(&ino) == Some(&(number, at)) {
                return Some((ino, size, at));
            }
        }
    }

    /// Number of candidates.
    pub(super) fn candidates(&self) -> usize {
        self.candidates.len()
    }

    /// The place of a candidate.
    pub(super) fn place(&self, ino: Ino) -> Option<Place> {
        self.candidates.get(&ino).copied()
    }

    /// Removes a candidate for good, and answers its place.
    pub(super) fn remove(&mut self, ino: Ino) -> Option<Place> {
        self.candidates.remove(&ino)
    }

    /// Numbers of remembered files and of runs.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.files, self.runs.len())
    }
}
