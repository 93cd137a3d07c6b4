//! Contents of small files that the kernel gets before a program asks for them.
//!
//! A program that reads a whole directory pays one request for each small file, which is two
//! context switches and little else. So files that a program reads in the order of the directory
//! are sent ahead of the program (`FUSE_NOTIFY_STORE`), as pages of one file are read ahead. One
//! file some way ahead is left out each time, the *marker*. The request for the marker tells how
//! far the program has come. (Linux sets PG_readahead on a page for the same purpose.)
//!
//! **Never over a program's data.** The kernel puts contents that are sent over the contents of
//! their page. So a file is sent only while no program can have changed it and the kernel has no
//! page of it. A file becomes a *candidate* when a listing tells the kernel of the file for the
//! first time: the kernel has no page of it then. The kernel gets a page, or another size, only by
//! one of these requests:
//!
//! - READ, also for a page that a program maps, which is read before it is written;
//! - GETXATTR of the file's capabilities before the first write(2), which has to clear them. WRITE
//!   would be too late: the kernel fills a whole page before it sends WRITE. A future kernel may
//!   write without GETXATTR. So the mount tests whether its kernel sends one
//!   (`cache/probe_file.rs`), and otherwise sends no files. A process that is killed inside
//!   GETXATTR leaves a file that is written without a GETXATTR. A WRITE past the pages of a file
//!   that was sent meanwhile may then carry sent contents, and fails;
//! - SETATTR, FALLOCATE and COPY_FILE_RANGE.
//!
//! Each of these requests removes the candidate for good ([`Prefetch::touched`]) before the request
//! is carried out. Contents that were read from the volume go out only if the file is still a
//! candidate then, and sending removes it too. So a file is sent at most once for each time that
//! the kernel comes to know it, before any program uses the file.
//!
//! One case is left: a request that comes while the file is on its way, *in flight*.
//!
//! - READ, GETXATTR, and WRITE of mapped pages: the sender may hold the lock of a page until it has
//!   the answer. If the kernel has stored the contents before, the lock was taken later, and no
//!   data is lost. If not, the store waits for that lock, and would overwrite the program's changes
//!   to the page as soon as it has the lock. But the store reads the contents only when it has the
//!   lock. So the contents are taken from it first, [`Revocable::revoke`], and then the request is
//!   answered.
//! - The other requests hold no page. They wait until the flight has ended, since the flight may
//!   undo their truncation. All of them hold the lock of the file, so at most one waits.
//!
//! To all other programs, prefetch looks like a program that reads the file at that moment. So does
//! its access time.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};
use ramet_fs::Ino;
use ramet_sys::Revocable;
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::protocol::Answer;

mod predict;

use predict::{DIRECTORY, Place, Prediction};
pub(crate) use predict::{FILE_BYTES_MAX, Listing};

/// The files of a mount that may be sent, are in flight, or were sent.
#[derive(Default)]
pub(crate) struct Prefetch {
    state: Mutex<State>,
    /// Number of candidates, files in flight and sent files. Requests skip the lock when it is 0.
    known: AtomicUsize,
    ended: Condvar,
    /// Threads that wait for the end of the flight.
    waiting: AtomicUsize,
    /// Whether files are sent at all.
    is_on: AtomicBool,
    sent_files: AtomicU64,
    revoked_files: AtomicU64,
}

/// The effect that a request may have on a file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Touch {
    /// Its sender may wait with a page locked: it reads a page, or writes a mapped page back.
    Page,
    /// Its sender is about to fill pages, and holds none yet: it asks for capabilities.
    Fills,
    /// Its sender has filled pages.
    Filled,
    /// Its sender holds no page, but the lock of the file, and may make it shorter.
    Size,
}

#[derive(Default)]
struct State {
    prediction: Prediction,
    in_flight: Option<(Ino, Arc<Revocable>)>,
    /// Files that were sent or whose flight was revoked, and that no program has filled since the
    /// kernel came to know them.
    sent: HashSet<Ino>,
}

impl State {
    fn is_in_flight(&self, ino: Ino) -> bool {
        self.in_flight.as_ref().is_some_and(|(of, _)| *of == ino)
    }
}

impl Prefetch {
    /// A listing told the kernel of a file of `bytes` bytes. The kernel did not know the file
    /// before, and has not heard of it by another request yet.
    pub(crate) fn note_file(&self, listing: Listing, thread: u32, ino: Ino, bytes: u64) {
        if bytes > 0 {
            self.add(listing, thread, (ino, bytes));
        }
    }

    /// A listing has a directory. A walk through all entries in order visits that directory before
    /// the files behind it.
    pub(crate) fn note_directory(&self, listing: Listing, thread: u32) {
        // All directories share one number, since no file has it.
        self.add(listing, thread, (Ino(0), DIRECTORY));
    }

    fn add(&self, listing: Listing, thread: u32, file: (Ino, u64)) {
        if !self.is_on() {
            return;
        }
        let mut state = self.state.lock();
        // A flight that has not ended may fill a page of the file that the kernel knows from now
        // on.
        let may_send = !state.is_in_flight(file.0);
        state.prediction.add(listing, thread, file, may_send);
        self.count(&state);
    }

    /// A listing goes on, so the kernel has the entries before. Answers the run to send, if its
    /// reader is known to read in order.
    pub(crate) fn continue_listing(&self, listing: Listing, thread: u32) -> Option<u64> {
        if self.known.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let mut state = self.state.lock();
        state.prediction.continue_listing(listing, thread)
    }

    /// Must be called before a request is carried out that reads a file, or may change its
    /// contents; see the module. `reader` is the thread of a request that reads. Answers the run to
    /// send then.
    ///
    /// # Errors
    /// `EIO` if contents in flight cannot be revoked, or a program may have filled pages
    /// that were sent: the request must not be carried out.
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
        let at = state.prediction.remove(ino);
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
                // The kernel ignores an error of this request.
                true
            }
        };
        while waits && state.is_in_flight(ino) {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            self.ended.wait(&mut state);
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
        Ok(read.and_then(|(at, reader)| state.prediction.read(at, reader).then_some(at.0)))
    }

    /// The kernel has forgotten a file, and has not heard of it again yet.
    pub(crate) fn forgotten(&self, ino: Ino) {
        if self.known.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut state = self.state.lock();
        state.prediction.remove(ino);
        if !state.is_in_flight(ino) {
            state.sent.remove(&ino);
        }
        self.count(&state);
    }

    /// Threads that wait for the end of a flight, which may wait for a page that another request
    /// has locked. One at most, since a waiting thread has the lock of the one file in flight.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Files become candidates from now on.
    pub(crate) fn start(&self) {
        self.is_on.store(true, Ordering::SeqCst);
    }

    /// No more files are sent.
    pub(crate) fn stop(&self) {
        self.is_on.store(false, Ordering::SeqCst);
    }

    fn is_on(&self) -> bool {
        self.is_on.load(Ordering::SeqCst)
    }

    /// Sends the due files of a run. `read` puts the contents of a file into its room and answers
    /// their length. `write` hands them to the kernel and answers whether the kernel took them. For
    /// one thread at a time.
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
            // The room is lent for a flight, and no other thread has it after that.
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
                && let Some(_flight) = self.begin_flight(ino, (run, at), bytes)
                && write(ino, bytes)
            {
                self.sent_files.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// The next file of a run that is to be sent, its bytes, and its index.
    fn next(&self, number: u64) -> Option<(Ino, u64, usize)> {
        if !self.is_on() {
            return None;
        }
        self.state.lock().prediction.next(number)
    }

    /// Begins the flight of a file if the file is still the candidate that was read: it may have
    /// changed, been forgotten, and become a candidate again.
    fn begin_flight(&self, ino: Ino, at: Place, bytes: &Arc<Revocable>) -> Option<Flight<'_>> {
        let mut state = self.state.lock();
        debug_assert!(state.in_flight.is_none(), "one at a time");
        if state.prediction.place(ino) != Some(at) {
            return None;
        }
        state.prediction.remove(ino);
        state.sent.insert(ino);
        state.in_flight = Some((ino, Arc::clone(bytes)));
        self.count(&state);
        Some(Flight(self))
    }

    fn end_flight(&self) {
        let mut state = self.state.lock();
        state.in_flight = None;
        self.count(&state);
        self.ended.notify_all();
    }

    fn count(&self, state: &State) {
        let in_flight = usize::from(state.in_flight.is_some());
        let known = state.prediction.candidates() + state.sent.len() + in_flight;
        self.known.store(known, Ordering::SeqCst);
    }

    /// Counts of the files that the kernel took, and of the revoked files.
    pub(crate) fn json(&self) -> Value {
        json!({
            "sent_files": self.sent_files.load(Ordering::Relaxed),
            "revoked_files": self.revoked_files.load(Ordering::Relaxed),
        })
    }
}

/// The flight of a file. It ends when this is dropped.
struct Flight<'a>(&'a Prefetch);

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.0.end_flight();
    }
}

#[cfg(test)]
mod tests {
    use super::predict::{FILES, RUNS, WINDOW};
    use super::*;

    const ME: u32 = 7;
    const DIR: Listing = Listing(1);

    fn started() -> Prefetch {
        let prefetch = Prefetch::default();
        prefetch.start();
        prefetch
    }

    fn listed(files: u64) -> Prefetch {
        let prefetch = started();
        (0..files).for_each(|file| prefetch.note_file(DIR, ME, Ino(100 + file), 10));
        prefetch
    }

    /// Reads the contents of a file, of which each has the same.
    fn ten(_: Ino, room: &mut [u8]) -> Option<usize> {
        room[..10].fill(1);
        Some(10)
    }

    fn send(
        prefetch: &Prefetch,
        run: u64,
        read: impl FnMut(Ino, &mut [u8]) -> Option<usize>,
        write: impl FnMut(Ino, &Revocable) -> bool,
    ) {
        let mut bytes = Arc::new(Revocable::new(100).unwrap());
        prefetch.send(run, &mut bytes, read, write).unwrap();
    }

    /// Sends the due files of a run. Answers their numbers.
    fn sent(prefetch: &Prefetch, run: Option<u64>) -> Vec<u64> {
        let mut all = Vec::new();
        if let Some(run) = run {
            let write = |ino: Ino, bytes: &Revocable| {
                assert_eq!(bytes.len(), 10);
                all.push(ino.0 - 100);
                true
            };
            send(prefetch, run, ten, write);
        }
        all
    }

    /// `ME` reads this file. Answers the files that are sent then.
    fn reads(prefetch: &Prefetch, file: u64) -> Vec<u64> {
        let run = prefetch
            .touched(Ino(100 + file), Touch::Page, Some(ME))
            .unwrap();
        sent(prefetch, run)
    }

    /// `ME` reads the first files, and nothing is sent yet.
    fn begin(prefetch: &Prefetch) {
        assert_eq!(reads(prefetch, 0), [0; 0]);
        assert_eq!(reads(prefetch, 1), [0; 0]);
    }

    /// `ME` begins to read in order. Answers the run that is due.
    fn due(prefetch: &Prefetch) -> u64 {
        begin(prefetch);
        let touched = prefetch.touched(Ino(102), Touch::Page, Some(ME));
        touched.unwrap().unwrap()
    }

    #[test]
    fn program_that_reads_in_order_gets_larger_and_larger_windows() {
        let prefetch = listed(1_000);
        begin(&prefetch);
        // Two files are left to the program, and the marker in the middle tells how far it came.
        assert_eq!(reads(&prefetch, 2), [5, 6, 7, 8, 10, 11, 12]);
        assert_eq!(reads(&prefetch, 4), [0; 0]);
        assert_eq!(reads(&prefetch, 3), [0; 0]);
        assert_eq!(reads(&prefetch, 9).len(), 15);
        let mut last = 20;
        let mut asked = 0;
        while last < 999 {
            let next = (last..1_000).find(|file| {
                let state = prefetch.state.lock();
                state.prediction.place(Ino(100 + file)).is_some()
            });
            let Some(next) = next else { break };
            let now = reads(&prefetch, next);
            assert!(now.len() <= *WINDOW.end());
            (last, asked) = (next, asked + 1);
        }
        assert_eq!(last, 999, "the last one is asked for");
        assert!(asked < 20, "{asked}");
        assert_eq!(prefetch.state.lock().prediction.candidates(), 0);
    }

    #[test]
    fn program_that_has_caught_up_is_left_files_to_read_itself() {
        let prefetch = listed(200);
        begin(&prefetch);
        assert_eq!(reads(&prefetch, 2), [5, 6, 7, 8, 10, 11, 12]);
        // The program asks for the marker 21 while 20 is in flight. Eight files are left to the
        // program, and sending goes on behind them.
        let run = prefetch.touched(Ino(109), Touch::Page, Some(ME)).unwrap();
        let mut all = Vec::new();
        let write = |ino: Ino, _: &Revocable| {
            all.push(ino.0 - 100);
            if ino == Ino(120) {
                let due = prefetch.touched(Ino(121), Touch::Page, Some(ME)).unwrap();
                assert_eq!(due, run, "more of the same");
            }
            true
        };
        send(&prefetch, run.unwrap(), ten, write);
        assert_eq!(all[..9], [13, 14, 15, 16, 17, 18, 19, 20, 30]);
    }

    #[test]
    fn reader_in_order_starts_the_next_directory_sooner() {
        let prefetch = listed(12);
        assert_eq!(
            prefetch.continue_listing(DIR, ME),
            None,
            "its reader is not known yet"
        );
        begin(&prefetch);
        assert_eq!(reads(&prefetch, 2), [5, 6, 7, 8, 9, 10, 11]);
        let next = Listing(2);
        (0..12).for_each(|file| prefetch.note_file(next, ME, Ino(200 + file), 10));
        let all = [101, 102, 103, 104, 106, 107, 108];
        assert_eq!(sent(&prefetch, prefetch.continue_listing(next, ME)), all);
        assert_eq!(prefetch.continue_listing(next, ME), None, "once");
        // The thread read none of these files: it only lists names.
        let third = Listing(3);
        (0..12).for_each(|file| prefetch.note_file(third, ME, Ino(300 + file), 10));
        assert_eq!(prefetch.continue_listing(third, ME), None);
    }

    #[test]
    fn program_that_reads_out_of_order_gets_no_files() {
        let prefetch = listed(500);
        for file in [400, 399, 100, 250, 30, 200, 120] {
            assert_eq!(reads(&prefetch, file), [0; 0], "{file}");
        }
        // Reads of another place do not disturb the order of a run.
        begin(&prefetch);
        assert_eq!(reads(&prefetch, 300), [0; 0]);
        assert_eq!(reads(&prefetch, 2).len(), 7);
        for file in [410, 411, 412] {
            assert_eq!(reads(&prefetch, file), [0; 0], "{file}");
        }
        assert_eq!(reads(&prefetch, 413).len(), 7);
    }

    #[test]
    fn file_that_a_request_touched_is_not_sent() {
        let prefetch = listed(100);
        begin(&prefetch);
        for (file, touch) in [(6, Touch::Page), (7, Touch::Size)] {
            prefetch.touched(Ino(100 + file), touch, None).unwrap();
        }
        assert_eq!(reads(&prefetch, 2), [5, 8, 10, 11, 12]);
        // These files are touched after they were read from the volume and before they are sent.
        let prefetch = listed(100);
        let run = due(&prefetch);
        let read = |ino: Ino, room: &mut [u8]| {
            room[..10].fill(1);
            let changes = matches!(ino.0, 106 | 108);
            changes.then(|| prefetch.touched(ino, Touch::Size, None).unwrap());
            // The kernel forgot this file and heard of it again.
            (ino == Ino(108)).then(|| prefetch.note_file(Listing(2), ME, ino, 10));
            // This file has another size than the listing said.
            Some(if ino == Ino(107) { 9 } else { 10 })
        };
        let mut all = Vec::new();
        let write = |ino: Ino, _: &Revocable| {
            all.push(ino.0 - 100);
            true
        };
        send(&prefetch, run, read, write);
        assert_eq!(all, [5, 10, 11, 12]);
    }

    #[test]
    fn file_that_is_asked_for_in_flight_is_revoked() {
        let prefetch = listed(100);
        let run = due(&prefetch);
        let write = |ino: Ino, bytes: &Revocable| {
            assert!(!bytes.is_revoked());
            prefetch
                .touched(Ino(ino.0 + 1), Touch::Page, Some(ME))
                .unwrap();
            assert!(!bytes.is_revoked(), "another one");
            prefetch.touched(ino, Touch::Page, Some(ME)).unwrap();
            assert!(bytes.is_revoked());
            false
        };
        send(&prefetch, run, ten, write);
        assert!(prefetch.revoked_files.load(Ordering::SeqCst) > 0);
        assert_eq!(prefetch.sent_files.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn write_without_a_request_for_capabilities_fails_if_the_file_was_sent() {
        let fails = |touched: Answer<_>| touched.is_err();
        let prefetch = listed(100);
        let run = due(&prefetch);
        let write = |ino: Ino, bytes: &Revocable| {
            match ino.0 {
                105 => assert!(fails(prefetch.touched(ino, Touch::Filled, None))),
                106 => {
                    prefetch.touched(ino, Touch::Fills, None).unwrap();
                    assert!(bytes.is_revoked());
                    prefetch.touched(ino, Touch::Filled, None).unwrap();
                }
                // The kernel hears of the file again meanwhile: the flight may give it a page.
                107 => {
                    prefetch.forgotten(ino);
                    prefetch.note_file(Listing(2), ME, ino, 10);
                    assert!(prefetch.state.lock().prediction.place(ino).is_none());
                }
                _ => {}
            }
            true
        };
        send(&prefetch, run, ten, write);
        let filled = |file: u64| prefetch.touched(Ino(100 + file), Touch::Filled, None);
        assert!(fails(filled(7)));
        assert!(fails(filled(8)) && !fails(filled(8)), "once");
        // The page is written back from a mapping first, and then filled by another program.
        prefetch.touched(Ino(110), Touch::Page, None).unwrap();
        prefetch.touched(Ino(110), Touch::Fills, None).unwrap();
        assert!(!fails(filled(10)));
        prefetch.forgotten(Ino(111));
        assert!(!fails(filled(11)));
        assert!(!fails(filled(50)), "it was not sent");
        (0..100).for_each(|file| prefetch.forgotten(Ino(100 + file)));
        assert_eq!(prefetch.known.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn change_of_size_waits_for_the_end_of_the_flight() {
        let prefetch = Arc::new(listed(100));
        let run = due(&prefetch);
        let has_landed = Arc::new(AtomicUsize::new(0));
        let mut changing = None;
        let write = |ino: Ino, _: &Revocable| {
            if changing.is_none() {
                let (changed, landed) = (Arc::clone(&prefetch), Arc::clone(&has_landed));
                changing = Some(std::thread::spawn(move || {
                    changed.touched(ino, Touch::Size, None).unwrap();
                    landed.load(Ordering::SeqCst)
                }));
                // Until the change waits for the flight.
                while prefetch.waiting.load(Ordering::SeqCst) == 0 {
                    std::thread::yield_now();
                }
                has_landed.store(1, Ordering::SeqCst);
            }
            true
        };
        send(&prefetch, run, ten, write);
        assert_eq!(changing.unwrap().join().unwrap(), 1);
    }

    #[test]
    fn remembered_files_and_runs_stay_within_their_bounds() {
        let prefetch = started();
        for listing in 0..200 {
            for file in 0..1_000 {
                prefetch.note_file(Listing(listing), ME, Ino(1_000 * listing + file), 10);
            }
        }
        let one = Listing(1_000);
        for file in 0..2 * FILES as u64 {
            prefetch.note_file(one, ME, Ino(1_000_000 + file), 10);
            let state = prefetch.state.lock();
            let (files, runs) = state.prediction.sizes();
            assert!(files <= FILES && runs <= RUNS);
            assert!(state.prediction.candidates() <= files);
        }
        prefetch.note_file(one, ME, Ino(5), 0);
        assert!(
            prefetch.state.lock().prediction.place(Ino(5)).is_none(),
            "an empty file is never sent"
        );
    }

    #[test]
    fn large_files_are_asked_for_in_their_turn() {
        let prefetch = started();
        for file in 0..40 {
            let is_large = matches!(file, 7 | 8 | 13);
            let bytes = if is_large { FILE_BYTES_MAX + 1 } else { 10 };
            if file == 30 {
                prefetch.note_directory(DIR, ME);
                prefetch.note_directory(DIR, ME);
            }
            prefetch.note_file(DIR, ME, Ino(100 + file), bytes);
        }
        begin(&prefetch);
        assert_eq!(reads(&prefetch, 2), [5, 6]);
        for left in [3, 4] {
            assert_eq!(reads(&prefetch, left), [0; 0]);
        }
        assert_eq!(reads(&prefetch, 7), [0; 0], "another large one");
        assert_eq!(reads(&prefetch, 8), [0; 0]);
        assert_eq!(reads(&prefetch, 9), [10, 11, 12]);
        assert_eq!(reads(&prefetch, 13), [0; 0]);
        assert_eq!(reads(&prefetch, 14), (15..30).collect::<Vec<_>>());
        // The order goes on through the directory, and behind it.
        prefetch.note_file(Listing(2), ME, Ino(500), 10);
        assert_eq!(
            *prefetch.state.lock().prediction.window_of(ME),
            *WINDOW.end()
        );
        assert_eq!(reads(&prefetch, 30), (31..40).collect::<Vec<_>>());
    }

    #[test]
    fn two_files_of_each_directory_are_no_order() {
        let prefetch = listed(100);
        due(&prefetch);
        for listing in 2..10 {
            let first = 1_000 * listing;
            (0..20)
                .for_each(|file| prefetch.note_file(Listing(listing), ME, Ino(first + file), 10));
            // The program asked for no marker of the first directory.
            assert_eq!(
                prefetch.continue_listing(Listing(listing), ME),
                None,
                "{listing}"
            );
            for file in [first + 2, first + 5] {
                let due = prefetch.touched(Ino(file), Touch::Page, Some(ME));
                assert_eq!(due.unwrap(), None, "{listing}");
            }
        }
    }
}
