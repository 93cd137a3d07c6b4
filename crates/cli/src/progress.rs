//! Progress for work that may take long, on a terminal only and only after a second.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Work shorter than this shows nothing.
const QUIET: Duration = Duration::from_secs(1);

/// A bar that appears when the work turns out to be long.
pub struct Progress {
    label: &'static str,
    begun: Instant,
    bar: Option<ProgressBar>,
    terminal: bool,
}

impl Progress {
    pub fn new(label: &'static str) -> Progress {
        Progress {
            label,
            begun: Instant::now(),
            bar: None,
            terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Tells that `done` of `total` units are finished; a total of zero is unknown.
    pub fn set(&mut self, done: u64, total: u64) {
        let template = "{prefix} {bar:30} {percent}% {elapsed_precise}";
        if let Some(bar) = self.shown(template, || ProgressBar::new(total)) {
            bar.set_length(total);
            bar.set_position(done.min(total));
        }
    }

    /// Tells how far work has come whose end is not known.
    pub fn tell(&mut self, text: impl FnOnce() -> String) {
        let template = "{prefix} {spinner} {msg} {elapsed_precise}";
        if let Some(bar) = self.shown(template, ProgressBar::new_spinner) {
            bar.set_message(text());
            bar.tick();
        }
    }

    /// The bar, made on first use; `None` while the work is short, or without a terminal.
    fn shown(
        &mut self,
        template: &str,
        make: impl FnOnce() -> ProgressBar,
    ) -> Option<&ProgressBar> {
        if !self.terminal || self.begun.elapsed() < QUIET {
            return None;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let style = ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            make().with_style(style).with_prefix(self.label)
        });
        Some(bar)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
