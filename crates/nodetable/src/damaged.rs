//! Pages that are kept twice and of which one copy is bad: the next commits write them anew.

use parking_lot::Mutex;
use ramet_block::PageRef;

use crate::page::{Page, Shape, Structure};

/// Damaged pages that are noted until the next commit; more are found again by a later read.
const DAMAGED_MAX: usize = 1024;

/// Pages of which one copy is bad and the other was read instead. Its lock is for memory operations
/// only.
#[derive(Default)]
pub(crate) struct DamagedPages(Mutex<Noted>);

#[derive(Default)]
struct Noted {
    pages: Vec<DamagedPage>,
    /// A page was noted since the pages were taken.
    has_news: bool,
    /// Pages that are damaged for certain.
    found: u64,
}

/// A page of which one copy is bad, and where a walk finds it.
#[derive(Debug, Clone)]
pub(crate) struct DamagedPage {
    pub structure: Structure,
    pub at: PageRef,
    pub height: u8,
    pub first_key: Box<[u8]>,
    /// Whether it is among the pages that were found. A walk that commits overtook may have met a
    /// page that was written over. The value is false for that page.
    pub is_counted: bool,
}

impl DamagedPages {
    /// Notes that a copy of `page`, which `at` points to, is bad: for certain, or as far as a walk
    /// can tell beside commits.
    pub fn note(&self, shape: &Shape, at: PageRef, page: &Page, is_certain: bool) {
        let mut noted = self.0.lock();
        if let Some(known) = noted.pages.iter_mut().find(|known| known.at == at) {
            let is_news = is_certain && !known.is_counted;
            known.is_counted |= is_certain;
            noted.found += u64::from(is_news);
            return;
        }
        noted.found += u64::from(is_certain);
        if noted.pages.len() < DAMAGED_MAX {
            noted.has_news = true;
            noted.pages.push(DamagedPage {
                structure: shape.structure,
                at,
                height: page.height,
                first_key: page.first_key().into(),
                is_counted: is_certain,
            });
        }
    }

    /// Counts a damaged page that a commit renewed.
    pub fn count(&self) {
        self.0.lock().found += 1;
    }

    /// Keeps a damaged page for a later commit.
    pub fn keep(&self, page: DamagedPage) {
        self.0.lock().pages.push(page);
    }

    /// Whether a damaged page was noted since the last commit.
    pub fn has_news(&self) -> bool {
        self.0.lock().has_news
    }

    /// Hands over the pages that are noted.
    pub fn take(&self) -> Vec<DamagedPage> {
        let mut noted = self.0.lock();
        noted.has_news = false;
        std::mem::take(&mut noted.pages)
    }

    /// Pages of which a read found one bad copy, since the store was opened.
    pub fn found(&self) -> u64 {
        self.0.lock().found
    }
}
