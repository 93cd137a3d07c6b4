//! Invariants of the shadowing trees and of the free-space map.
//!
//! - S1: keys ascend strictly within a page and lie within the bounds that the parents give.
//! - S2: heights fall by one per step, and height 0 is a leaf.
//! - S3: entry bytes are counted right and fit; away from the root, a leaf holds a quarter of the
//!   capacity less one entry or more, an index page at least two children; a root index as well.
//! - S4: a page has one pointer, from another page or from the root.
//! - S5: the first key of an index page is the lower bound that its parent gives.
//! - S6: no two pages overlap.
//! - S7: a page on disk names only pages on disk (checked where pages are encoded).
//! - M1: holes of the free-space map are sorted, disjoint, inside, and do not touch.
//! - M2: holes are exactly the space that neither pages nor extents of nodes cover.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use ramet_block::Extent;

use crate::error::{Error, Result};
use crate::free_map::FreeMap;
use crate::page::{Body, Entry, Link, Page, Shape};
use crate::store::PageStore;
use crate::tree::ShadowTree;

/// A broken invariant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Its number: S1 to S7, M1, M2, N1 to N9.
    pub invariant: &'static str,
    /// Where and how.
    pub detail: String,
}

impl Violation {
    pub(crate) fn new(invariant: &'static str, detail: impl Into<String>) -> Self {
        Self {
            invariant,
            detail: detail.into(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.detail)
    }
}

/// A page to look at: how to reach it, its height, its bounds.
struct Visit {
    link: Link,
    height: Option<u8>,
    low: Box<[u8]>,
    high: Option<Box<[u8]>>,
}

struct Walk<'a> {
    store: &'a PageStore,
    /// Pages that a pointer led to.
    seen: HashSet<u64>,
    pages: Vec<Extent>,
    violations: Vec<Violation>,
}

/// Walks `tree` and checks S1 to S5. Returns the violations and the extents of all pages.
pub(crate) fn verify_tree(tree: &ShadowTree) -> Result<(Vec<Violation>, Vec<Extent>)> {
    let mut walk = Walk {
        store: &tree.store,
        seen: HashSet::new(),
        pages: vec![],
        violations: vec![],
    };
    walk.tree(tree)?;
    Ok((walk.violations, walk.pages))
}

impl Walk<'_> {
    fn tree(&mut self, tree: &ShadowTree) -> Result<()> {
        let Some(root) = &tree.root else {
            return Ok(());
        };
        let low: Box<[u8]> = Box::default();
        let mut stack = vec![Visit {
            link: root.clone(),
            height: None,
            low,
            high: None,
        }];
        while let Some(visit) = stack.pop() {
            let addr = visit.link.addr();
            if !self.seen.insert(addr) {
                let detail = format!("page {addr:#x} has several pointers");
                self.violations.push(Violation::new("S4", detail));
                continue;
            }
            let page = self.store.resolve(&tree.shape, &visit.link, visit.height)?;
            let copies = visit.link.place().copies();
            let extent = |addr| Extent::new(addr, tree.shape.page_bytes.into());
            self.pages.extend(copies.map(extent));
            self.page(&tree.shape, &visit, &page);
            if let Body::Index(entries) = &page.body {
                for (at, entry) in entries.iter().enumerate() {
                    let high = entries.get(at + 1).map(|next| next.key.clone());
                    stack.push(Visit {
                        link: entry.link.clone(),
                        height: Some(page.height - 1),
                        low: entry.key.clone(),
                        high: high.or_else(|| visit.high.clone()),
                    });
                }
            }
        }
        Ok(())
    }

    fn page(&mut self, shape: &Shape, visit: &Visit, page: &Arc<Page>) {
        let mut wrong = |invariant, detail: String| {
            let detail = format!("page {:#x}: {detail}", page.addr);
            self.violations.push(Violation::new(invariant, detail));
        };
        let (keys, used): (Vec<&[u8]>, usize) = match &page.body {
            Body::Leaf(e) => (
                e.iter().map(Entry::key).collect(),
                e.iter().map(Entry::size).sum(),
            ),
            Body::Index(e) => (
                e.iter().map(Entry::key).collect(),
                e.iter().map(Entry::size).sum(),
            ),
        };
        let ordered = keys.windows(2).all(|pair| pair[0] < pair[1]);
        let bounded = keys.first().is_none_or(|first| **first >= *visit.low)
            && visit
                .high
                .as_ref()
                .is_none_or(|high| keys.last().is_none_or(|last| **last < **high));
        if !ordered || !bounded {
            wrong("S1", "keys out of order or bounds".into());
        }
        let is_leaf = matches!(page.body, Body::Leaf(_));
        if is_leaf != (page.height == 0) {
            wrong(
                "S2",
                format!("kind does not go with height {}", page.height),
            );
        }
        if used != page.used || used > shape.capacity() {
            wrong("S3", format!("{used} entry bytes, {} counted", page.used));
        }
        let least = (shape.capacity() / 4).saturating_sub(shape.entry_max(0));
        if is_leaf && visit.height.is_some() && (used < least || keys.is_empty()) {
            wrong("S3", format!("only {used} entry bytes"));
        }
        if !is_leaf && keys.len() < 2 {
            wrong("S3", "an index page with fewer than two children".into());
        }
        if !is_leaf && keys.first().is_some_and(|first| **first != *visit.low) {
            wrong(
                "S5",
                "first key differs from the bound in the parent".into(),
            );
        }
    }
}

/// Checks M1, M2 and S6. `taken` begins with all other pages and extents of nodes.
pub(crate) fn verify_free_map(
    store: &PageStore,
    map: &FreeMap,
    taken: &mut Vec<Extent>,
) -> Result<Vec<Violation>> {
    let mut violations = Vec::new();
    let holes = match map.holes() {
        Ok(holes) => holes,
        Err(Error::Corrupt { detail, .. }) => return Ok(vec![Violation::new("M1", detail)]),
        Err(error) => return Err(error),
    };
    let (wrong, pages) = verify_tree(&map.tree)?;
    violations.extend(wrong);
    taken.extend(pages);
    taken.sort_unstable();
    for pair in taken.windows(2).filter(|pair| pair[0].overlaps(&pair[1])) {
        violations.push(Violation::new(
            "S6",
            format!("{} and {} overlap", pair[0], pair[1]),
        ));
    }
    let mut covered: Vec<(Extent, bool)> = taken.iter().map(|extent| (*extent, false)).collect();
    covered.extend(holes.into_iter().map(|hole| (hole, true)));
    covered.sort_unstable();
    let mut at = store.usable().addr;
    for (extent, is_hole) in covered {
        if extent.addr > at {
            let gap = Extent::new(at, extent.addr - at);
            violations.push(Violation::new(
                "M2",
                format!("{gap} is neither free nor in use"),
            ));
        }
        if extent.addr < at && is_hole {
            violations.push(Violation::new("M2", format!("{extent} is free and in use")));
        }
        at = at.max(extent.end());
    }
    if at < store.usable().end() {
        let gap = Extent::new(at, store.usable().end() - at);
        violations.push(Violation::new(
            "M2",
            format!("{gap} is neither free nor in use"),
        ));
    }
    Ok(violations)
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::page::{IndexEntry, Place};
    use crate::testing::{SHAPE, USABLE, World};

    fn at(addr: u64) -> Place {
        Place { addr, copy: 0 }
    }

    /// The violations after `forge` has changed the root page of a tree of height 1.
    fn found(forge: impl FnOnce(&mut Page)) -> Vec<&'static str> {
        let mut world = World::new();
        for n in 0..40u32 {
            let key = n.to_be_bytes();
            world.tree.insert(&key, &[1; 30]).unwrap();
        }
        world.commit();
        let mut tree = world.tree;
        tree.insert(&7u32.to_be_bytes(), &[2; 30]).unwrap();
        let (violations, _) = verify_tree(&tree).unwrap();
        assert_eq!(violations, []);
        let Some(Link::Dirty(root)) = &mut tree.root else {
            panic!("the root was shadowed")
        };
        let root = Arc::get_mut(root).unwrap();
        assert_eq!(root.height, 1);
        forge(root);
        let (violations, _) = verify_tree(&tree).unwrap();
        violations
            .iter()
            .map(|violation| violation.invariant)
            .collect()
    }

    fn dirty_leaf(root: &mut Page) -> &mut Page {
        let Body::Index(entries) = &mut root.body else {
            panic!("an index page")
        };
        let dirty = entries.iter_mut().find_map(|entry| match &mut entry.link {
            Link::Dirty(page) => Arc::get_mut(page),
            Link::Disk(_) => None,
        });
        dirty.unwrap()
    }

    #[test]
    fn s1_keys_out_of_order() {
        let got = found(|root| {
            let Body::Leaf(entries) = &mut dirty_leaf(root).body else {
                panic!("a leaf")
            };
            entries.swap(0, 1);
        });
        assert_eq!(got, ["S1"]);
    }

    #[test]
    fn s1_a_key_beyond_the_bounds_of_its_leaf() {
        let got = found(|root| {
            let Body::Leaf(entries) = &mut dirty_leaf(root).body else {
                panic!("a leaf")
            };
            entries.last_mut().unwrap().key = [0xff; 4].into();
        });
        assert_eq!(got, ["S1"]);
    }

    #[test]
    fn s2_a_leaf_above_the_ground() {
        // A child of height 1 under a root of height 1 cannot even be walked.
        let mut tree = World::new().tree;
        tree.insert(b"k", b"v").unwrap();
        let Some(Link::Dirty(root)) = &mut tree.root else {
            panic!("a dirty root")
        };
        Arc::get_mut(root).unwrap().height = 1;
        let (violations, _) = verify_tree(&tree).unwrap();
        assert_eq!(
            violations.iter().map(|v| v.invariant).collect::<Vec<_>>(),
            ["S2"]
        );
    }

    #[test]
    fn s2_heights_that_do_not_fall_by_one_are_corrupt() {
        let mut tree = World::new().tree;
        for n in 0..40u32 {
            tree.insert(&n.to_be_bytes(), &[1; 30]).unwrap();
        }
        let Some(Link::Dirty(root)) = &mut tree.root else {
            panic!("a dirty root")
        };
        Arc::get_mut(root).unwrap().height = 2;
        assert!(matches!(tree.lookup(b"1234"), Err(Error::Corrupt { .. })));
        assert!(matches!(verify_tree(&tree), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn s3_miscounted_bytes() {
        assert_eq!(found(|root| dirty_leaf(root).used += 1), ["S3"]);
    }

    #[test]
    fn s3_an_index_page_with_one_child() {
        let got = found(|root| {
            let Body::Index(entries) = &mut root.body else {
                panic!("an index page")
            };
            entries.truncate(1);
            root.used = entries[0].size();
        });
        assert_eq!(got, ["S3"]);
    }

    #[test]
    fn s4_a_page_with_two_pointers() {
        let got = found(|root| {
            let Body::Index(entries) = &mut root.body else {
                panic!("an index page")
            };
            // The same child twice: S1 for its bounds as well.
            let twin = entries[1].link.clone();
            entries[2].link = twin;
        });
        assert!(got.contains(&"S4"), "{got:?}");
    }

    #[test]
    fn s5_an_index_page_that_begins_elsewhere() {
        let got = found(|root| {
            let Body::Index(entries) = &mut root.body else {
                panic!("an index page")
            };
            entries[0].key = [0, 0].into();
            root.used += 2;
        });
        assert_eq!(got, ["S5"]);
    }

    /// The root of the tree is given the place of the root of the map.
    #[test]
    fn s6_two_pages_in_one_place() {
        let mut world = World::new();
        world.tree.insert(b"k", b"v").unwrap();
        world.commit();
        assert_eq!(world.verify(), []);
        let place = world.map.tree.root.as_ref().unwrap().place().addr;
        world.tree.insert(b"k", b"w").unwrap();
        let Some(Link::Dirty(root)) = &mut world.tree.root else {
            panic!("the root was shadowed")
        };
        // Half of a page further, so that it is another one in the same place.
        Arc::get_mut(root).unwrap().addr = place + 2048;
        let violations = world.verify();
        assert_eq!(violations[0].invariant, "S6", "{violations:?}");
    }

    #[test]
    #[should_panic(expected = "S7")]
    fn s7_a_page_on_disk_above_one_in_memory() {
        let child = Arc::new(Page::new(at(USABLE.addr), 0, Body::Leaf(vec![])));
        let entry = IndexEntry {
            key: Box::default(),
            link: Link::Dirty(child),
        };
        let body = Body::Index(vec![entry]);
        Page::new(at(USABLE.addr + 4096), 1, body).encode(&SHAPE);
    }
}
