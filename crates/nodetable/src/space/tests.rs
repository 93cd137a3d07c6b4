//! The allocator as a whole: holes, windows, bare space and the reserve.

use ramet_block::Extent;

use super::map::SpaceMap;
use super::windows::{METADATA_MAX, Purpose};
use crate::error::Error;

const MIB: u64 = 1 << 20;

fn fresh(len: u64) -> SpaceMap {
    let usable = Extent::new(MIB, len);
    let mut space = SpaceMap::new(usable, false);
    space.free_now(usable);
    space
}

fn sparse(len: u64) -> SpaceMap {
    let usable = Extent::new(MIB, len);
    let mut space = SpaceMap::new(usable, true);
    space.free_bare(usable);
    space
}

fn verify(space: &SpaceMap) {
    let all = space.free_extents();
    assert!(
        all.windows(2).all(|pair| pair[0].end() <= pair[1].addr),
        "A1"
    );
    assert!(
        all.iter()
            .all(|extent| extent.validate(space.usable).is_ok()),
        "A1"
    );
    assert_eq!(
        all.iter().map(|extent| extent.len).sum::<u64>(),
        space.free_bytes(),
        "A2"
    );
}

#[test]
fn extents_allocated_in_sequence_are_contiguous() {
    let mut space = fresh(4096 * MIB);
    let mut last: Option<Extent> = None;
    let mut breaks = 0;
    for i in 0..200 {
        let leaf = space.alloc(MIB, Purpose::Contents).unwrap();
        // Pages and segments that are allocated meanwhile must not lie between the leaves.
        space.alloc(8192, Purpose::Checkpoint).unwrap();
        space
            .alloc(65_536 + 4096 * (i % 7), Purpose::Contents)
            .unwrap();
        breaks += u32::from(last.is_some_and(|last| last.end() != leaf.addr));
        last = Some(leaf);
    }
    assert!(breaks <= 200 / 32, "{breaks} breaks");
    verify(&space);
}

#[test]
fn only_a_checkpoint_may_use_the_reserve_and_it_can_use_it_all() {
    let mut space = fresh(16 * MIB);
    assert_eq!(space.reserve_bytes(), MIB);
    let mut contents = 0;
    while space.alloc(65_536, Purpose::Contents).is_ok() {
        contents += 65_536;
    }
    assert_eq!(contents, 15 * MIB);
    let mut reserve = 0;
    while space.alloc(8192, Purpose::Checkpoint).is_ok() {
        reserve += 8192;
    }
    assert_eq!(reserve, MIB);
    assert!(matches!(
        space.alloc(1, Purpose::Checkpoint),
        Err(Error::NoSpace { wanted_bytes: 1 })
    ));
    verify(&space);
}

#[test]
fn absurd_lengths_are_no_space() {
    let mut space = fresh(16 * MIB);
    for len in [17 * MIB, u64::MAX, u64::MAX - 5000] {
        assert!(matches!(
            space.alloc(len, Purpose::Contents),
            Err(Error::NoSpace { .. })
        ));
    }
}

#[test]
fn freed_at_commit_is_not_reused_before_release() {
    let mut space = fresh(16 * MIB);
    let extent = space.alloc(15 * MIB, Purpose::Contents).unwrap();
    space.free_at_commit(extent);
    assert!(space.alloc(2 * MIB, Purpose::Checkpoint).is_err());
    assert_eq!(space.pending_bytes(), 15 * MIB);
    let freed = space.take_freed();
    space.release(&freed);
    assert_eq!((space.pending_bytes(), space.free_bytes()), (0, 16 * MIB));
    verify(&space);
}

#[test]
fn only_an_extent_that_is_free_as_a_whole_is_taken() {
    let mut space = fresh(16 * MIB);
    let (start, end) = (space.usable.addr, space.usable.end());
    let middle = Extent::new(start + 4 * MIB, MIB);
    assert!(space.take(middle));
    assert!(!space.take(middle), "twice");
    for (addr, len) in [
        (start - 4096, 8192),
        (end - 4096, 8192),
        (start, 0),
        (start + 1, 4096),
        (middle.addr - 4096, 8192),
        (middle.end() - 4096, 8192),
        (u64::MAX - 4095, 4096),
    ] {
        assert!(!space.take(Extent::new(addr, len)), "{addr} {len}");
    }
    assert!(space.take(Extent::new(start, 4 * MIB)));
    assert!(space.take(Extent::new(middle.end(), end - middle.end())));
    assert_eq!(space.free_bytes(), 0);
    verify(&space);
    space.free_now(middle);
    assert!(space.alloc(4096, Purpose::Checkpoint).is_ok());
    assert!(!space.take(middle), "a part is in use");
    verify(&space);
}

#[test]
fn an_extent_that_is_partly_backed_and_partly_bare_is_taken_as_a_whole() {
    let mut space = sparse(64 * MIB);
    for from in [8 * MIB, 16 * MIB] {
        let backed = space.begin_backing(from, 2 * MIB, 2 * MIB);
        space.end_moving(&backed, true);
    }
    // Bare, backed, bare, backed, bare.
    let across = Extent::new(7 * MIB, 12 * MIB);
    let moving = space.begin_backing(12 * MIB, 4096, 4096);
    assert!(!space.take(across), "a part is moving");
    assert_eq!(
        (space.free_bytes(), space.backed_bytes()),
        (64 * MIB, 4 * MIB)
    );
    space.end_moving(&moving, false);
    verify(&space);
    assert!(space.take(across));
    assert_eq!((space.free_bytes(), space.backed_bytes()), (52 * MIB, 0));
    assert!(!space.is_free_somewhere(across));
    verify(&space);
    assert!(
        !space.take(Extent::new(6 * MIB, 2 * MIB)),
        "a part is in use"
    );
}

#[test]
fn only_backed_extents_are_handed_out() {
    let mut space = sparse(64 * MIB);
    assert_eq!((space.free_bytes(), space.backed_bytes()), (64 * MIB, 0));
    assert!(space.alloc(4096, Purpose::Checkpoint).is_err());

    let front = space.begin_backing(0, 8 * MIB, 64 * MIB);
    assert_eq!(front, [Extent::new(MIB, 8 * MIB)]);
    assert!(space.is_free_somewhere(front[0]), "about to be backed");
    verify(&space);
    space.end_moving(&front, true);
    // The reserve is that of a volume of 8 MiB.
    assert_eq!(space.room_bytes(0), 7 * MIB);
    assert_eq!(space.room_bytes(4 * MIB), 11 * MIB);
    assert_eq!(space.room_bytes(u64::MAX), 63 * MIB);
    let used = space.alloc(7 * MIB, Purpose::Contents).unwrap();
    assert!(space.alloc(4096, Purpose::Contents).is_err());
    assert!(space.alloc(MIB, Purpose::Checkpoint).is_ok());
    assert!(space.alloc(4096, Purpose::Checkpoint).is_err());

    // A freed extent is backed; the highest goes first.
    space.free_now(used);
    let back = space.begin_baring(2 * MIB);
    assert_eq!(back, [Extent::new(used.end() - 2 * MIB, 2 * MIB)]);
    space.end_moving(&back, false);
    assert_eq!(space.backed_bytes(), 5 * MIB);
    verify(&space);
    let pieces = space.begin_backing(0, 4 * MIB, 64 * MIB);
    assert_eq!(pieces, [back[0], Extent::new(9 * MIB, 2 * MIB)]);
    space.end_moving(&pieces, false);
    let one = space.begin_backing_one(3 * MIB, 3 * MIB).unwrap();
    assert_eq!(
        one,
        Extent::new(9 * MIB, 3 * MIB),
        "the smallest that is long enough"
    );
    space.end_moving(&[one], false);
    assert!(space.take(Extent::new(20 * MIB, MIB)), "also what is bare");
    verify(&space);
}

#[test]
fn the_new_part_of_a_sparse_device_is_bare() {
    let mut space = sparse(16 * MIB);
    let end = space.usable.end();
    space.grow(end + 16 * MIB);
    let freed = space.take_freed();
    space.release(&freed);
    assert_eq!((space.free_bytes(), space.backed_bytes()), (32 * MIB, 0));
    verify(&space);
}

#[test]
fn the_new_part_of_the_area_is_free_after_the_commit() {
    let mut space = fresh(16 * MIB);
    let most = space.alloc(12 * MIB, Purpose::Contents).unwrap();
    let end = space.usable.end();
    assert_eq!(space.grow(end + 48 * MIB), Extent::new(end, 48 * MIB));
    assert_eq!(
        (space.free_bytes(), space.pending_bytes()),
        (4 * MIB, 48 * MIB)
    );
    assert!(space.alloc(5 * MIB, Purpose::Checkpoint).is_err());
    assert!(space.alloc(2 * MIB, Purpose::Contents).is_ok());
    let freed = space.take_freed();
    space.release(&freed);
    assert!(space.alloc(5 * MIB, Purpose::Contents).is_ok());
    space.free_now(most);
    verify(&space);
}

#[test]
fn old_holes_are_used_before_fresh_space() {
    let mut space = fresh(4096 * MIB);
    let old = space.alloc(64 * MIB, Purpose::Contents).unwrap();
    let _wall = space.alloc(64 * MIB, Purpose::Contents).unwrap();
    space.free_now(old);
    assert!(old.contains(&space.alloc(MIB, Purpose::Contents).unwrap()));
}

#[test]
fn metadata_lies_together_and_apart_from_contents() {
    let mut space = fresh(4096 * MIB);
    let mut last = space.alloc(4096, Purpose::Checkpoint).unwrap();
    for kib in [48, 4, 8, 64, 12, 8].repeat(6) {
        space.alloc(kib << 13, Purpose::Contents).unwrap();
        let next = space.alloc(kib << 10, Purpose::Checkpoint).unwrap();
        assert_eq!(next.addr, last.end());
        last = next;
    }
    let long = space.alloc(METADATA_MAX + 1, Purpose::Checkpoint).unwrap();
    assert!(long.addr > last.end() || long.end() < last.addr);
    assert!(long.addr.abs_diff(last.end()) >= MIB / 4, "another window");
    verify(&space);
}

#[test]
fn an_opened_volume_goes_on_behind_its_newest_page() {
    for (gap, is_close) in [(0, true), (MIB / 2, true), (2 * MIB, false)] {
        let mut space = SpaceMap::new(Extent::new(MIB, 4096 * MIB), false);
        let (old, page) = (Extent::new(16 * MIB, MIB), Extent::new(64 * MIB, 8192));
        let hole = Extent::new(page.end() + gap, 32 * MIB);
        // Best fit, and too small.
        space.free_now(old);
        space.free_now(Extent::new(page.addr - 8192, 8192));
        space.free_now(hole);
        space.resume(page.addr);
        let leaf = space.alloc(MIB / 2, Purpose::Checkpoint).unwrap();
        let next = space.alloc(4096, Purpose::Checkpoint).unwrap();
        let want = if is_close { hole } else { old };
        assert_eq!(next.addr, want.addr, "{gap}");
        assert!(!leaf.overlaps(&next));
        verify(&space);
    }
}

#[test]
fn freeing_twice_ends_all_allocation() {
    let mut space = fresh(16 * MIB);
    let extent = space.alloc(MIB, Purpose::Contents).unwrap();
    space.free_at_commit(extent);
    space.free_now(extent);
    let freed = space.take_freed();
    space.release(&freed);
    assert_eq!((space.free_bytes(), space.pending_bytes()), (16 * MIB, 0));
    let refused = space.alloc(4096, Purpose::Checkpoint);
    let Err(Error::Corrupt { detail, .. }) = refused else {
        panic!("{refused:?}");
    };
    assert!(detail.starts_with("A1"), "{detail}");
    verify(&space);
}

#[test]
fn random_traffic_keeps_the_invariants_and_ends_in_one_hole() {
    let mut state = 12345u64;
    let mut next = move |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963);
        (state >> 33) % below
    };
    let mut space = fresh(64 * MIB);
    let mut live: Vec<Extent> = Vec::new();
    for step in 0..20_000 {
        if live.is_empty() || next(100) < 55 {
            let len = [4096, 8192, 40_000, 300_000, MIB][next(5) as usize];
            let purpose = match next(8) {
                0 => Purpose::Checkpoint,
                1 => Purpose::Copy,
                _ => Purpose::Contents,
            };
            if let Ok(extent) = space.alloc(len, purpose) {
                assert!(!live.iter().any(|other| other.overlaps(&extent)));
                live.push(extent);
            }
        } else {
            let extent = live.swap_remove(next(live.len() as u64) as usize);
            if next(2) == 0 {
                space.free_now(extent);
            } else {
                space.free_at_commit(extent);
            }
        }
        if step % 97 == 0 {
            let freed = space.take_freed();
            space.release(&freed);
            verify(&space);
        }
    }
    let freed = space.take_freed();
    space.release(&freed);
    for extent in live {
        space.free_now(extent);
    }
    verify(&space);
    assert!(space.take(Extent::new(MIB, 64 * MIB)), "one hole");
}

/// Pages of a table that is changed for long: each change writes a page anew and frees the old one.
#[test]
fn second_copies_lie_far_from_the_first_ones_on_an_aged_map_too() {
    let mut space = fresh(256 * MIB);
    let mut state = 7u64;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005) + 1;
        (state >> 33) % below
    };
    let pair = |space: &mut SpaceMap| {
        [Purpose::Checkpoint, Purpose::Copy].map(|purpose| space.alloc(8192, purpose).unwrap())
    };
    let mut pages: Vec<_> = (0..400).map(|_| pair(&mut space)).collect();
    for _ in 0..20_000 {
        let at = next(pages.len() as u64) as usize;
        let new = pair(&mut space);
        for old in std::mem::replace(&mut pages[at], new) {
            space.free_at_commit(old);
        }
        if next(8) == 0 {
            let freed = space.take_freed();
            space.release(&freed);
        }
    }
    let distance = |[first, copy]: &[Extent; 2]| first.addr.abs_diff(copy.addr);
    let least = pages.iter().map(distance).min();
    assert!(least.is_some_and(|least| least > 60 * MIB), "{least:?}");
}

#[test]
fn short_holes_are_no_room_for_pages_and_are_used_up_first_where_space_is_scarce() {
    let mut space = fresh(16 * MIB);
    let blocks = std::iter::from_fn(|| space.alloc(4096, Purpose::Checkpoint).ok());
    let mut blocks: Vec<_> = blocks.collect();
    blocks.sort_unstable();
    // 2 MiB in one piece, and 100 holes of a block.
    let (piece, rest) = blocks.split_at(512);
    let short: Vec<_> = rest.iter().skip(1).step_by(2).take(100).collect();
    for block in piece.iter().chain(short.iter().copied()) {
        space.free_now(*block);
    }
    assert_eq!(space.room_bytes(0), MIB + 100 * 4096);
    assert_eq!(space.short_bytes(), 100 * 4096);
    // A block between two of them makes one hole, and a page fits in it.
    space.free_now(rest[2]);
    assert_eq!(space.short_bytes(), 98 * 4096);
    let before = space.alloc(4096, Purpose::Checkpoint).unwrap();
    assert!(before.addr < rest[0].addr, "space is not scarce yet");
    // Less than a sixteenth is left in longer holes, and more with the short ones.
    space.alloc(MIB, Purpose::Checkpoint).unwrap();
    for _ in 0..98 {
        let one = space.alloc(4096, Purpose::Checkpoint).unwrap();
        assert!(short[2..].contains(&&one), "{one}");
    }
    let behind = space.alloc(4096, Purpose::Checkpoint).unwrap();
    assert!(!short[2..].contains(&&behind));
    verify(&space);
}
