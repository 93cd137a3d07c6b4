//! Diagnostics of a process that serves a mount.
//!
//! A serving thread never waits for its diagnostics and never ends by them. A line goes to a queue,
//! and one thread writes the queue to standard error (`--log FILE` for a daemon). A line is dropped
//! and counted if the queue is full or the line cannot be written: the disk may be full, or the
//! reader may be gone or not reading. The next line that can be written tells the count.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

/// Lines in the queue, at most.
const LINES_MAX: usize = 1024;
/// How long the end of the process waits for the queue.
const PATIENCE: Duration = Duration::from_secs(1);

enum Message {
    Line(Vec<u8>),
    /// Every line before this message was written or dropped.
    Done(SyncSender<()>),
}

/// The queue of lines. Dropping it waits a moment until the queue is empty.
pub struct Log {
    queue: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

impl Log {
    /// Diagnostics from the level in `RAMET_LOG` on, to standard error.
    ///
    /// # Errors
    /// The system has no more threads.
    pub fn to_stderr() -> io::Result<Log> {
        let level = std::env::var("RAMET_LOG")
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or(tracing::Level::INFO);
        let log = Log::to(io::stderr())?;
        let (queue, dropped) = (log.queue.clone(), Arc::clone(&log.dropped));
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || Line {
                queue: queue.clone(),
                dropped: Arc::clone(&dropped),
            })
            .log_internal_errors(false)
            .with_ansi(false)
            .with_max_level(level);
        // A second subscriber is refused, and the first is as good.
        let _ = subscriber.try_init();
        Ok(log)
    }

    fn to(out: impl Write + Send + 'static) -> io::Result<Log> {
        let (queue, lines) = sync_channel(LINES_MAX);
        let dropped = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&dropped);
        let thread = thread::Builder::new().name("log".into());
        thread.spawn(move || write_lines(out, &lines, &counter))?;
        Ok(Log { queue, dropped })
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let (done, is_done) = sync_channel(1);
        if self.queue.try_send(Message::Done(done)).is_ok() {
            // An error means that the reader does not read: the lines are lost.
            let _ = is_done.recv_timeout(PATIENCE);
        }
    }
}

fn write_lines(mut out: impl Write, lines: &Receiver<Message>, dropped: &AtomicU64) {
    for message in lines {
        match message {
            Message::Line(line) => {
                let lost = dropped.swap(0, Ordering::Relaxed);
                let note = match lost {
                    0 => String::new(),
                    lost => format!("({lost} lines before this one could not be written)\n"),
                };
                let bytes = [note.as_bytes(), &line].concat();
                if out.write_all(&bytes).is_err() {
                    dropped.fetch_add(lost + 1, Ordering::Relaxed);
                }
            }
            // The other end may have lost its patience.
            Message::Done(done) => drop(done.try_send(())),
        }
    }
}

/// A line in the making.
struct Line {
    queue: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.queue.try_send(Message::Line(bytes.to_vec())).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, pipe};

    fn line(log: &Log, text: &str) {
        let mut line = Line {
            queue: log.queue.clone(),
            dropped: Arc::clone(&log.dropped),
        };
        line.write_all(text.as_bytes())
            .expect("a line is never refused");
    }

    #[test]
    fn log_without_a_reader_delays_no_thread() {
        let (reader, writer) = pipe().expect("there are pipes");
        let log = Log::to(writer).expect("there are threads");
        let long = format!("{}\n", "x".repeat(4095));
        // A pipe holds 16 such lines.
        for _ in 0..4 * LINES_MAX {
            line(&log, &long);
        }
        assert!(log.dropped.load(Ordering::Relaxed) > 0);
        let mut lines = BufReader::new(reader).lines();
        let mut said = String::new();
        while !said.contains("could not be written") {
            line(&log, "later\n");
            said = lines.next().expect("it is open").expect("text");
        }
        // The log ends without a reader too.
        for _ in 0..LINES_MAX / 2 {
            line(&log, &long);
        }
        drop(log);
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted() {
        struct Full(SyncSender<Vec<u8>>, u32);
        impl Write for Full {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.1 += 1;
                if self.1 <= 3 {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                self.0.send(bytes.to_vec()).map_err(io::Error::other)?;
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (said, heard) = sync_channel(8);
        let log = Log::to(Full(said, 0)).expect("there are threads");
        for text in ["1\n", "2\n", "3\n", "4\n", "5\n"] {
            line(&log, text);
        }
        let next = || String::from_utf8(heard.recv().expect("it comes")).expect("text");
        assert_eq!(
            next(),
            "(3 lines before this one could not be written)\n4\n"
        );
        assert_eq!(next(), "5\n");
    }
}
