//! Contents of small files that the kernel gets before a program asks for them.
//!
//! A file of a few kilobytes costs a program that reads a whole directory a request, which is two changes of context, and little
//! else. So what it reads in the order of the directory is sent ahead of it (`FUSE_NOTIFY_STORE`), as pages of one file are read ahead
//! of it. One file some way ahead is left out each time: that the program asks for it tells where it is.
//!
//! **Never over what a program wrote.** The kernel puts what is sent over whatever its page holds. So only that goes out which nobody can have changed, nor have a page of. A file
//! becomes a *candidate* when a listing tells the kernel of it, which did not know it before: it has no page of it then. It gets one, or another size, behind a request only:
//!
//! - READ, also for a page that a program maps, which is read before it is written;
//! - GETXATTR of the file's capabilities before the first write(2), which has to take them away. WRITE would be too late: a whole page is filled before that is sent. Not every kernel
//!   need do so for ever, so the mount looks whether this one does (`cache/probe_file.rs`), and sends nothing if not. A process that is killed there, before anybody hears of it, leaves a file
//!   that is written without: a WRITE past the pages of a file that was sent meanwhile may be of what was sent, and fails;
//! - SETATTR, FALLOCATE and COPY_FILE_RANGE.
//!
//! Each of these takes the candidate back for good ([`Prefetch::touched`]), before it is carried out. What was read from the volume goes out only if the file is still a candidate then,
//! and is none from then on. So a file is sent at most once for each time that the kernel comes to know it, before anybody uses it.
//!
//! That leaves a request that comes while the file is on its way, *in flight*:
//!
//! - READ, GETXATTR, and WRITE of mapped pages: who asks may hold the lock of a page until the answer is there. If the kernel has put the contents there before, that one came later, and all is well.
//!   If not, it waits for that lock, and would overwrite what the program does with its page as soon as it has it. But it reads
//!   what it writes there only when it has the lock. So that is taken from it first, [`Revocable::revoke`], and then the request is answered.
//! - The others hold no page. They wait until the flight has ended, since it may make the file longer again than they made it. All hold the lock of the file, so one waits at most.
//!
//! To everybody else this is a program that reads the file at that moment. So is its access time.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};
use ramet_fs::Ino;
use ramet_sys::Revocable;
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::protocol::Answer;

/// Largest file that is sent, in bytes.
pub(crate) const FILE_BYTES_MAX: u64 = 32 << 10;
/// Files sent ahead, at least when it begins and at most later.
const WINDOW: std::ops::RangeInclusive<usize> = 8..=128;
/// Bytes of them, at most.
const WINDOW_BYTES: u64 = 1 << 20;
/// A program that skips so many files, or goes back so far, still reads in order: several threads take turns.
const SKIP: usize = 8;
/// Files that a program asks for in order before any is sent.
const PROOF: usize = 3;
/// Where fewer are left, none is left out.
const FEW: usize = 16;
/// Files that are left to the program when it has just begun: it is there sooner.
const LEAD: usize = 2;
/// A program that is so few files behind the one that is being sent has caught up: from then on it would wait for the page of each, idle, and who sends would wake it with each.
const NEAR: usize = 2;
/// Files that are left to it then. It is so far behind again when it has read them itself.
const GAP: usize = 8;
/// Files in listings that are remembered, at most; the oldest listing goes first.
const FILES: usize = 1 << 17;
/// Listings that are remembered, at most, and files of one; what comes behind these is another one.
const RUNS: usize = 64;
const RUN_FILES: usize = 1 << 12;
/// In place of the bytes of a directory.
const DIRECTORY: u64 = u64::MAX;
/// Programs that are known to read in order, at most; the number says where one is.
const READERS: usize = 64;

/// What may be sent.
#[derive(Default)]
pub(crate) struct Prefetch {
    state: Mutex<State>,
    /// Candidates, what is in flight, and what was sent: nothing to look for if that is 0.
    known: AtomicUsize,
    landed: Condvar,
    /// Threads that wait for the end of the flight.
    waiting: AtomicUsize,
    /// Whether anything is to be sent at all.
    is_on: AtomicBool,
    sent_files: AtomicU64,
    revoked_files: AtomicU64,
}

/// What a request may do that concerns a file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Touch {
    /// Its sender may wait with a page locked: it reads, or writes back what it mapped.
    Page,
    /// Its sender is about to fill pages, and holds none yet: it asks for capabilities.
    Fills,
    /// Its sender has filled pages.
    Filled,
    /// Its sender holds no page, but the lock of the file, and may make it shorter.
    Size,
}

/// A listing: the number of an open directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stream(pub(crate) u64);

struct State {
    /// By number, where each candidate is: which run, counted from the first ever, and which file of it.
    candidates: HashMap<Ino, (u64, usize)>,
    in_flight: Option<(Ino, Arc<Revocable>)>,
    /// What was sent, or would have been if it had not been revoked, and not filled since the kernel came to know it.
    sent: HashSet<Ino>,
    runs: VecDeque<Run>,
    /// Number of the first of `runs`.
    first_run: u64,
    /// Of all runs.
    files: usize,
    /// A thread, and the window of what it read last.
    readers: [(u32, usize); READERS],
}

/// The candidates of a listing, in its order, and what is between them: larger files and directories, which are never sent.
struct Run {
    stream: Stream,
    /// Who lists; others may read.
    asker: u32,
    files: Vec<(Ino, u64)>,
    /// How many were asked for in order, up to [`PROOF`].
    proof: usize,
    /// Position of the furthest one that was asked for in order, and of the last that was not.
    last: Option<usize>,
    jumped: Option<usize>,
    /// First one that is neither sent nor left out.
    next: usize,
    /// Where sending ends for now.
    target: usize,
    /// The one that is left out, before `target`, or what is never sent there.
    hole: Option<usize>,
    window: usize,
}

impl Default for State {
    fn default() -> Self {
        Self {
            candidates: HashMap::new(),
            in_flight: None,
            sent: HashSet::new(),
            runs: VecDeque::new(),
            first_run: 0,
            files: 0,
            readers: [(0, 0); READERS],
        }
    }
}

impl Run {
    /// Moves the target a window ahead of `from`, at most to the next large file or directory: the device should give what the program reads in order. Whether there is anything to send.
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
        self.hole = if self.files.get(target).is_some_and(is_large) {
            Some(target)
        } else if target < self.files.len() {
            Some(self.next + ahead / 2)
        } else {
            // There is nothing to go on with, but that the last one is asked for tells that the others were read. Of a few the first one tells.
            (ahead >= FEW).then(|| target - 1)
        };
        let has_more = target > self.target.max(self.next);
        self.target = self.target.max(target);
        has_more && (ahead > 1 || self.hole != Some(self.next))
    }

    /// Whether who asks for this one has come to the file that was left out, or nothing was sent.
    fn has_caught_up(&self, at: usize) -> bool {
        self.target == 0 || self.hole.map_or(at >= self.target, |hole| at >= hole)
    }

    /// Whether who asks for this one goes through the files in order.
    fn is_in_turn(&self, at: usize) -> bool {
        let reached = self.last.map_or(0, |last| last + 1);
        at + SKIP >= reached && at <= reached.max(self.next) + SKIP
    }
}

impl State {
    fn window_of(&mut self, reader: u32) -> &mut usize {
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

    /// The run of an open directory, and its number; a new one for who begins it.
    fn run_of(&mut self, stream: Stream, asker: u32) -> u64 {
        let goes_on = |run: &Run| run.stream == stream && run.files.len() < RUN_FILES;
        if let Some(at) = self.runs.iter().rposition(goes_on) {
            return self.first_run + at as u64;
        }
        if self.runs.iter().all(|run| run.stream != stream) {
            self.judge(asker);
        }
        if self.runs.len() == RUNS {
            self.drop_oldest();
        }
        self.runs.push_back(Run {
            stream,
            asker,
            files: Vec::new(),
            proof: 0,
            last: None,
            jumped: None,
            next: 0,
            target: 0,
            hole: None,
            window: 0,
        });
        self.first_run + self.runs.len() as u64 - 1
    }

    /// A reader who leaves a directory before it came to the file that was left out gets less ahead in the next one.
    fn judge(&mut self, asker: u32) {
        let Some(run) = self.runs.iter().rfind(|run| run.asker == asker) else {
            return;
        };
        // Who lists another directory has come to the one that sending stopped at.
        let is_missed = |hole: usize| {
            let is_directory = run.files[hole].1 == DIRECTORY;
            run.last < Some(hole) && !is_directory
        };
        let divisor = match run.last {
            _ if run.target == 0 => 1,
            None => usize::MAX,
            Some(_) if run.hole.is_some_and(is_missed) => 4,
            Some(_) => 1,
        };
        let window = self.window_of(asker);
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

    /// The file at `at` of a run was asked for. Whether there is something to send.
    fn read(&mut self, (number, at): (u64, usize), asker: u32) -> bool {
        let eager = *self.window_of(asker);
        let Some(run) = self.run(number) else {
            return false;
        };
        if !run.is_in_turn(at) {
            let jumped = run.jumped.replace(at);
            if jumped.is_none_or(|jumped| at < jumped || at > jumped + SKIP) {
                return false;
            }
            // It goes on from there.
            (run.window, run.proof, run.jumped) = (0, 1, None);
            (run.target, run.hole) = (0, None);
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
        // A large file is read for a while: what comes behind it is sent when one of that is asked for.
        let is_large = run.files[at].1 > FILE_BYTES_MAX;
        let goes_on = window > 0 && run.has_caught_up(at) && !is_large;
        let lead = match run.target {
            0 => LEAD,
            // What is due is still being sent.
            _ if run.next < run.target && run.next <= at + 1 + NEAR => GAP,
            _ => 0,
        };
        let sends = goes_on && run.extend(at + 1 + lead);
        if !begins && window > 0 {
            *self.window_of(asker) = window;
        }
        sends
    }
}

impl Prefetch {
    /// A listing told the kernel of a file of so many bytes, which it did not know before, nor has heard of by another request yet.
    pub(crate) fn lists(&self, stream: Stream, asker: u32, ino: Ino, bytes: u64) {
        if bytes > 0 {
            self.add(stream, asker, (ino, bytes));
        }
    }

    /// A listing has a directory: whoever goes through all in order goes through that before the files behind it.
    pub(crate) fn lists_directory(&self, stream: Stream, asker: u32) {
        // The same for all, since no file is.
        self.add(stream, asker, (Ino(0), DIRECTORY));
    }

    fn add(&self, stream: Stream, asker: u32, file: (Ino, u64)) {
        if !self.is_on() {
            return;
        }
        let mut state = self.state.lock();
        while state.files >= FILES {
            state.drop_oldest();
        }
        let number = state.run_of(stream, asker);
        let is_directory = file.1 == DIRECTORY;
        if let Some(run) = state.run(number)
            && !(is_directory && run.files.last() == Some(&file))
        {
            let at = run.files.len();
            run.files.push(file);
            state.files += 1;
            // What is still on its way may become a page of what the kernel knows now.
            let is_in_flight = state
                .in_flight
                .as_ref()
                .is_some_and(|(of, _)| *of == file.0);
            if !is_directory && !is_in_flight {
                state.candidates.insert(file.0, (number, at));
            }
        }
        self.count(&state);
    }

    /// A listing goes on, so the kernel has what came before. The run to send some of, if its reader is known to read in order.
    pub(crate) fn lists_on(&self, stream: Stream, asker: u32) -> Option<u64> {
        if self.known.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let mut state = self.state.lock();
        let eager = *state.window_of(asker);
        // Where it begins.
        let at = state.runs.iter().position(|run| run.stream == stream)?;
        let number = state.first_run + at as u64;
        let run = &mut state.runs[at];
        let begins_large = run
            .files
            .first()
            .is_some_and(|(_, size)| *size > FILE_BYTES_MAX);
        if eager == 0 || run.target > 0 || run.last.is_some() || begins_large {
            return None;
        }
        run.window = eager;
        // The first one is asked for at once.
        run.extend(1).then_some(number)
    }

    /// To be called before a request of `asker` is carried out that reads a file, or may change what is in it; see the module. The run to send more of now, if it reads.
    ///
    /// # Errors
    /// `EIO` if what is under way cannot be taken back, or a program may have filled pages that were sent then: the request must not be carried out.
    pub(crate) fn touched(
        &self,
        ino: Ino,
        touch: Touch,
        reader: Option<u32>,
    ) -> Answer<Option<u64>> {
        if self.known.load(Ordering::SeqCst) == 0 {
            return Ok(None);
        }
        let mut state = self.state.lock();
        let at = state.candidates.remove(&ino);
        let in_flight = state.in_flight.as_ref().filter(|(of, _)| *of == ino);
        let is_under_way = in_flight.is_some_and(|(_, bytes)| !bytes.is_revoked());
        let revoked = match in_flight {
            Some((_, bytes)) if touch != Touch::Size => {
                self.revoked_files.fetch_add(1, Ordering::Relaxed);
                bytes.revoke()
            }
            _ => Ok(()),
        };
        let waits = match (touch, revoked) {
            (Touch::Size, _) => true,
            (_, Ok(())) => false,
            (touch, Err(error)) => {
                tracing::error!(%error, "contents on their way cannot be taken back");
                if touch != Touch::Fills {
                    return Err(Errno::IO);
                }
                // The kernel minds no error there.
                true
            }
        };
        while waits && state.in_flight.as_ref().is_some_and(|(of, _)| *of == ino) {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            self.landed.wait(&mut state);
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        if matches!(touch, Touch::Fills | Touch::Filled) {
            let was_sent = state.sent.remove(&ino);
            if touch == Touch::Filled && (was_sent || is_under_way) {
                self.count(&state);
                tracing::error!(ino = ino.0, "written to without asking: the write fails");
                return Err(Errno::IO);
            }
        }
        self.count(&state);
        let read = at.zip(reader);
        Ok(read.and_then(|(at, reader)| state.read(at, reader).then_some(at.0)))
    }

    /// The kernel knows nothing of a file any more, and nobody has told it again yet.
    pub(crate) fn forgotten(&self, ino: Ino) {
        if self.known.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut state = self.state.lock();
        state.candidates.remove(&ino);
        let is_in_flight = state.in_flight.as_ref().is_some_and(|(of, _)| *of == ino);
        if !is_in_flight {
            state.sent.remove(&ino);
        }
        self.count(&state);
    }

    /// Threads that wait until the kernel has a page, which may be locked by who waits for another answer. One at most, since who waits has the lock of the one file that is in flight.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// From now on there are candidates.
    pub(crate) fn start(&self) {
        self.is_on.store(true, Ordering::SeqCst);
    }

    /// Nothing more is sent.
    pub(crate) fn stop(&self) {
        self.is_on.store(false, Ordering::SeqCst);
    }

    fn is_on(&self) -> bool {
        self.is_on.load(Ordering::SeqCst)
    }

    /// Sends what is due of a run: `read` puts the contents of a file into the room it gets and says how many bytes those are, and `write` hands them to the kernel
    /// and says whether it took them. For one thread at a time.
    ///
    /// # Errors
    /// The room cannot be used again.
    pub(crate) fn send(
        &self,
        run: u64,
        bytes: &mut Arc<Revocable>,
        mut read: impl FnMut(Ino, &mut [u8]) -> Option<usize>,
        mut write: impl FnMut(Ino, &Revocable) -> bool,
    ) -> std::io::Result<()> {
        while let Some((ino, size, at)) = self.next(run) {
            // It is lent for a flight, and nobody has it behind that.
            let Some(room) = Arc::get_mut(bytes) else {
                return Ok(());
            };
            let mut is_whole = false;
            room.fill(|room| {
                let len = read(ino, room).filter(|len| *len as u64 == size);
                is_whole = len.is_some();
                len.unwrap_or(0)
            })?;
            if is_whole
                && let Some(_flight) = self.take_off(ino, (run, at), bytes)
                && write(ino, bytes)
            {
                self.sent_files.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// The next file of a run that is to be sent, its bytes, and its place.
    fn next(&self, number: u64) -> Option<(Ino, u64, usize)> {
        let mut state = self.state.lock();
        loop {
            let run = state.run(number)?;
            // The program is further already.
            run.next = run.next.max(run.last.map_or(0, |last| last + 1));
            if run.next >= run.target || !self.is_on() {
                return None;
            }
            let (at, (ino, size)) = (run.next, run.files[run.next]);
            run.next += 1;
            let is_left = Some(at) == run.hole || size > FILE_BYTES_MAX;
            if !is_left && state.candidates.get(&ino) == Some(&(number, at)) {
                return Some((ino, size, at));
            }
        }
    }

    /// Has the file be in flight if it is the candidate that it was when it was read: it may have changed, been forgotten, and be one again.
    fn take_off(&self, ino: Ino, at: (u64, usize), bytes: &Arc<Revocable>) -> Option<Flight<'_>> {
        let mut state = self.state.lock();
        debug_assert!(state.in_flight.is_none(), "one at a time");
        if state.candidates.get(&ino) != Some(&at) {
            return None;
        }
        state.candidates.remove(&ino);
        state.sent.insert(ino);
        state.in_flight = Some((ino, Arc::clone(bytes)));
        self.count(&state);
        Some(Flight(self))
    }

    fn lands(&self) {
        let mut state = self.state.lock();
        state.in_flight = None;
        self.count(&state);
        self.landed.notify_all();
    }

    fn count(&self, state: &State) {
        let in_flight = usize::from(state.in_flight.is_some());
        let known = state.candidates.len() + state.sent.len() + in_flight;
        self.known.store(known, Ordering::SeqCst);
    }

    /// Files that the kernel took, and those that were asked for on their way.
    pub(crate) fn json(&self) -> Value {
        json!({
            "sent_files": self.sent_files.load(Ordering::Relaxed),
            "revoked_files": self.revoked_files.load(Ordering::Relaxed),
        })
    }
}

/// A file that is on its way until this is dropped.
struct Flight<'a>(&'a Prefetch);

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.0.lands();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: u32 = 7;
    const DIR: Stream = Stream(1);

    fn started() -> Prefetch {
        let ahead = Prefetch::default();
        ahead.start();
        ahead
    }

    fn listed(files: u64) -> Prefetch {
        let ahead = started();
        (0..files).for_each(|file| ahead.lists(DIR, ME, Ino(100 + file), 10));
        ahead
    }

    /// What each file has.
    fn ten(_: Ino, room: &mut [u8]) -> Option<usize> {
        room[..10].fill(1);
        Some(10)
    }

    fn send(
        ahead: &Prefetch,
        run: u64,
        read: impl FnMut(Ino, &mut [u8]) -> Option<usize>,
        write: impl FnMut(Ino, &Revocable) -> bool,
    ) {
        let mut bytes = Arc::new(Revocable::new(100).unwrap());
        ahead.send(run, &mut bytes, read, write).unwrap();
    }

    /// Sends what is due, and tells which files that were.
    fn sent(ahead: &Prefetch, run: Option<u64>) -> Vec<u64> {
        let mut all = Vec::new();
        if let Some(run) = run {
            let write = |ino: Ino, bytes: &Revocable| {
                assert_eq!(bytes.len(), 10);
                all.push(ino.0 - 100);
                true
            };
            send(ahead, run, ten, write);
        }
        all
    }

    /// `ME` reads this file, and what is sent then.
    fn reads(ahead: &Prefetch, file: u64) -> Vec<u64> {
        let run = ahead
            .touched(Ino(100 + file), Touch::Page, Some(ME))
            .unwrap();
        sent(ahead, run)
    }

    /// `ME` reads the first files, and nothing is sent yet.
    fn begin(ahead: &Prefetch) {
        assert_eq!(reads(ahead, 0), [0; 0]);
        assert_eq!(reads(ahead, 1), [0; 0]);
    }

    /// `ME` begins to read in order: the run that is to be sent.
    fn due(ahead: &Prefetch) -> u64 {
        begin(ahead);
        let touched = ahead.touched(Ino(102), Touch::Page, Some(ME));
        touched.unwrap().unwrap()
    }

    #[test]
    fn who_goes_on_in_order_gets_more_and_more() {
        let ahead = listed(1_000);
        begin(&ahead);
        // Two are left to the program, and one in the middle to tell that it came so far.
        assert_eq!(reads(&ahead, 2), [5, 6, 7, 8, 10, 11, 12]);
        assert_eq!(reads(&ahead, 4), [0; 0]);
        assert_eq!(reads(&ahead, 3), [0; 0]);
        assert_eq!(reads(&ahead, 9).len(), 15);
        let mut last = 20;
        let mut asked = 0;
        while last < 999 {
            let next = (last..1_000).find(|file| {
                let state = ahead.state.lock();
                state.candidates.contains_key(&Ino(100 + file))
            });
            let Some(next) = next else { break };
            let now = reads(&ahead, next);
            assert!(now.len() <= *WINDOW.end());
            (last, asked) = (next, asked + 1);
        }
        assert_eq!(last, 999, "the last one is asked for");
        assert!(asked < 20, "{asked}");
        assert_eq!(ahead.state.lock().candidates.len(), 0);
    }

    #[test]
    fn who_has_caught_up_is_left_behind() {
        let ahead = listed(200);
        begin(&ahead);
        assert_eq!(reads(&ahead, 2), [5, 6, 7, 8, 10, 11, 12]);
        // It asks for 21, which is left out, when 20 is on its way: eight are left to it, and what is sent goes on behind them.
        let run = ahead.touched(Ino(109), Touch::Page, Some(ME)).unwrap();
        let mut all = Vec::new();
        let write = |ino: Ino, _: &Revocable| {
            all.push(ino.0 - 100);
            if ino == Ino(120) {
                let due = ahead.touched(Ino(121), Touch::Page, Some(ME)).unwrap();
                assert_eq!(due, run, "more of the same");
            }
            true
        };
        send(&ahead, run.unwrap(), ten, write);
        assert_eq!(all[..9], [13, 14, 15, 16, 17, 18, 19, 20, 30]);
    }

    #[test]
    fn a_reader_in_order_starts_the_next_directory_sooner() {
        let ahead = listed(12);
        assert_eq!(ahead.lists_on(DIR, ME), None, "nobody knows it yet");
        begin(&ahead);
        assert_eq!(reads(&ahead, 2), [5, 6, 7, 8, 9, 10, 11]);
        let next = Stream(2);
        (0..12).for_each(|file| ahead.lists(next, ME, Ino(200 + file), 10));
        let all = [101, 102, 103, 104, 106, 107, 108];
        assert_eq!(sent(&ahead, ahead.lists_on(next, ME)), all);
        assert_eq!(ahead.lists_on(next, ME), None, "once");
        // It read none of them, so it only looks at names.
        let third = Stream(3);
        (0..12).for_each(|file| ahead.lists(third, ME, Ino(300 + file), 10));
        assert_eq!(ahead.lists_on(third, ME), None);
    }

    #[test]
    fn who_jumps_about_gets_nothing() {
        let ahead = listed(500);
        for file in [400, 399, 100, 250, 30, 200, 120] {
            assert_eq!(reads(&ahead, file), [0; 0], "{file}");
        }
        // Somebody else somewhere else does no harm, and from where one goes on it goes on.
        begin(&ahead);
        assert_eq!(reads(&ahead, 300), [0; 0]);
        assert_eq!(reads(&ahead, 2).len(), 7);
        for file in [410, 411, 412] {
            assert_eq!(reads(&ahead, file), [0; 0], "{file}");
        }
        assert_eq!(reads(&ahead, 413).len(), 7);
    }

    #[test]
    fn what_was_touched_is_not_sent() {
        let ahead = listed(100);
        begin(&ahead);
        for (file, touch) in [(6, Touch::Page), (7, Touch::Size)] {
            ahead.touched(Ino(100 + file), touch, None).unwrap();
        }
        assert_eq!(reads(&ahead, 2), [5, 8, 10, 11, 12]);
        // Touched after it was read from the volume, before it is sent.
        let ahead = listed(100);
        let run = due(&ahead);
        let read = |ino: Ino, room: &mut [u8]| {
            room[..10].fill(1);
            let changes = matches!(ino.0, 106 | 108);
            changes.then(|| ahead.touched(ino, Touch::Size, None).unwrap());
            // And the kernel forgot it, and heard of it again.
            (ino == Ino(108)).then(|| ahead.lists(Stream(2), ME, ino, 10));
            // This one changed before, and nobody said so.
            Some(if ino == Ino(107) { 9 } else { 10 })
        };
        let mut all = Vec::new();
        let write = |ino: Ino, _: &Revocable| {
            all.push(ino.0 - 100);
            true
        };
        send(&ahead, run, read, write);
        assert_eq!(all, [5, 10, 11, 12]);
    }

    #[test]
    fn what_is_asked_for_on_its_way_is_revoked() {
        let ahead = listed(100);
        let run = due(&ahead);
        let write = |ino: Ino, bytes: &Revocable| {
            assert!(!bytes.is_revoked());
            ahead
                .touched(Ino(ino.0 + 1), Touch::Page, Some(ME))
                .unwrap();
            assert!(!bytes.is_revoked(), "another one");
            ahead.touched(ino, Touch::Page, Some(ME)).unwrap();
            assert!(bytes.is_revoked());
            false
        };
        send(&ahead, run, ten, write);
        assert!(ahead.revoked_files.load(Ordering::SeqCst) > 0);
        assert_eq!(ahead.sent_files.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn what_is_written_without_asking_fails_if_it_was_sent() {
        let fails = |touched: Answer<_>| touched.is_err();
        let ahead = listed(100);
        let run = due(&ahead);
        let write = |ino: Ino, bytes: &Revocable| {
            match ino.0 {
                105 => assert!(fails(ahead.touched(ino, Touch::Filled, None))),
                106 => {
                    ahead.touched(ino, Touch::Fills, None).unwrap();
                    assert!(bytes.is_revoked());
                    ahead.touched(ino, Touch::Filled, None).unwrap();
                }
                // The kernel hears of it again meanwhile: it may get a page by this.
                107 => {
                    ahead.forgotten(ino);
                    ahead.lists(Stream(2), ME, ino, 10);
                    assert!(!ahead.state.lock().candidates.contains_key(&ino));
                }
                _ => {}
            }
            true
        };
        send(&ahead, run, ten, write);
        let filled = |file: u64| ahead.touched(Ino(100 + file), Touch::Filled, None);
        assert!(fails(filled(7)));
        assert!(fails(filled(8)) && !fails(filled(8)), "once");
        // Written back from a mapping, and then filled by who asked.
        ahead.touched(Ino(110), Touch::Page, None).unwrap();
        ahead.touched(Ino(110), Touch::Fills, None).unwrap();
        assert!(!fails(filled(10)));
        ahead.forgotten(Ino(111));
        assert!(!fails(filled(11)));
        assert!(!fails(filled(50)), "it was not sent");
        (0..100).for_each(|file| ahead.forgotten(Ino(100 + file)));
        assert_eq!(ahead.known.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn what_changes_contents_waits_for_the_end_of_the_flight() {
        let ahead = Arc::new(listed(100));
        let run = due(&ahead);
        let has_landed = Arc::new(AtomicUsize::new(0));
        let mut changing = None;
        let write = |ino: Ino, _: &Revocable| {
            if changing.is_none() {
                let (ahead, landed) = (Arc::clone(&ahead), Arc::clone(&has_landed));
                changing = Some(std::thread::spawn(move || {
                    ahead.touched(ino, Touch::Size, None).unwrap();
                    landed.load(Ordering::SeqCst)
                }));
                std::thread::sleep(std::time::Duration::from_millis(20));
                has_landed.store(1, Ordering::SeqCst);
            }
            true
        };
        send(&ahead, run, ten, write);
        assert_eq!(changing.unwrap().join().unwrap(), 1);
    }

    #[test]
    fn no_more_is_remembered_than_there_is_room_for() {
        let ahead = started();
        for stream in 0..200 {
            for file in 0..1_000 {
                ahead.lists(Stream(stream), ME, Ino(1_000 * stream + file), 10);
            }
        }
        let one = Stream(1_000);
        for file in 0..2 * FILES as u64 {
            ahead.lists(one, ME, Ino(1_000_000 + file), 10);
            let state = ahead.state.lock();
            assert!(state.files <= FILES && state.runs.len() <= RUNS);
            assert!(state.candidates.len() <= state.files);
        }
        ahead.lists(one, ME, Ino(5), 0);
        assert!(
            !ahead.state.lock().candidates.contains_key(&Ino(5)),
            "nobody asks for it"
        );
    }

    #[test]
    fn large_files_are_asked_for_in_their_turn() {
        let ahead = started();
        for file in 0..40 {
            let is_large = matches!(file, 7 | 8 | 13);
            let bytes = if is_large { FILE_BYTES_MAX + 1 } else { 10 };
            if file == 30 {
                ahead.lists_directory(DIR, ME);
                ahead.lists_directory(DIR, ME);
            }
            ahead.lists(DIR, ME, Ino(100 + file), bytes);
        }
        begin(&ahead);
        assert_eq!(reads(&ahead, 2), [5, 6]);
        for left in [3, 4] {
            assert_eq!(reads(&ahead, left), [0; 0]);
        }
        assert_eq!(reads(&ahead, 7), [0; 0], "another large one");
        assert_eq!(reads(&ahead, 8), [0; 0]);
        assert_eq!(reads(&ahead, 9), [10, 11, 12]);
        assert_eq!(reads(&ahead, 13), [0; 0]);
        assert_eq!(reads(&ahead, 14), (15..30).collect::<Vec<_>>());
        // Through the directory, and behind it.
        ahead.lists(Stream(2), ME, Ino(500), 10);
        assert_eq!(*ahead.state.lock().window_of(ME), *WINDOW.end());
        assert_eq!(reads(&ahead, 30), (31..40).collect::<Vec<_>>());
    }

    #[test]
    fn two_of_each_directory_are_no_order() {
        let ahead = listed(100);
        due(&ahead);
        for stream in 2..10 {
            let first = 1_000 * stream;
            (0..20).for_each(|file| ahead.lists(Stream(stream), ME, Ino(first + file), 10));
            // What was sent of the first directory was not asked for.
            assert_eq!(ahead.lists_on(Stream(stream), ME), None, "{stream}");
            for file in [first + 2, first + 5] {
                let due = ahead.touched(Ino(file), Touch::Page, Some(ME));
                assert_eq!(due.unwrap(), None, "{stream}");
            }
        }
    }
}
