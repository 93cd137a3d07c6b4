//! Access control lists, in the form in which the kernel stores them: values of two extended
//! attributes.
//!
//! Little-endian: the version 2 (4 bytes), then entries of 8 bytes: tag (2), permissions (2), and
//! the number of a user or group (4), which is `ff ff ff ff` where the tag names none. The order
//! is: owner, users, owning group, groups, mask, others. A list that names users or groups has a
//! mask; the mask limits all entries but those of owner and others.
//!
//! The group bits of a mode are the mask, or the owning group's permissions in a list without a
//! mask. A list that says no more than nine bits of a mode is never stored.

use crate::error::{Error, Result};

/// The attribute with the list that decides about accesses.
pub(crate) const ACCESS: &[u8] = b"system.posix_acl_access";
/// The attribute of a directory with the list that new entries start with.
pub(crate) const DEFAULT: &[u8] = b"system.posix_acl_default";
/// Longest list, in bytes: a page of the kernel.
pub(crate) const ACL_BYTES_MAX: usize = 4096;

const VERSION: u32 = 2;
const ENTRY_BYTES: usize = 8;
const NO_ID: u32 = u32::MAX;
/// The permission bits of one class.
const RWX: u32 = 0o7;

/// The processes that an entry is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tag {
    Owner,
    User(u32),
    OwningGroup,
    Group(u32),
    Mask,
    Other,
}

impl Tag {
    fn decode(tag: u16, id: u32) -> Option<Self> {
        Some(match tag {
            0x01 => Self::Owner,
            0x02 => Self::User(id),
            0x04 => Self::OwningGroup,
            0x08 => Self::Group(id),
            0x10 => Self::Mask,
            0x20 => Self::Other,
            _ => return None,
        })
    }

    /// The number of the tag, and that of the user or group.
    fn encode(self) -> (u16, u32) {
        match self {
            Self::Owner => (0x01, NO_ID),
            Self::User(id) => (0x02, id),
            Self::OwningGroup => (0x04, NO_ID),
            Self::Group(id) => (0x08, id),
            Self::Mask => (0x10, NO_ID),
            Self::Other => (0x20, NO_ID),
        }
    }

    /// Whether an entry with this tag may follow one with `before`; `None` stands for the start.
    fn may_follow(self, before: Option<Self>) -> bool {
        match self {
            Self::Owner => before.is_none(),
            Self::User(_) => matches!(before, Some(Self::Owner | Self::User(_))),
            Self::OwningGroup => matches!(before, Some(Self::Owner | Self::User(_))),
            Self::Group(_) => matches!(before, Some(Self::OwningGroup | Self::Group(_))),
            Self::Mask => matches!(before, Some(Self::OwningGroup | Self::Group(_))),
            Self::Other => matches!(
                before,
                Some(Self::OwningGroup | Self::Group(_) | Self::Mask)
            ),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AclEntry {
    tag: Tag,
    /// Bits of [`RWX`].
    perm: u32,
}

/// An access control list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Acl {
    entries: Vec<AclEntry>,
}

impl Acl {
    /// Reads a list.
    ///
    /// # Errors
    /// `Invalid` for anything that is no list.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        const INVALID: Error = Error::Invalid("access control list");
        let (version, rest) = bytes.split_first_chunk().ok_or(INVALID)?;
        let is_long = bytes.len() > ACL_BYTES_MAX;
        if u32::from_le_bytes(*version) != VERSION || rest.len() % ENTRY_BYTES != 0 || is_long {
            return Err(INVALID);
        }
        let mut entries: Vec<AclEntry> = Vec::with_capacity(rest.len() / ENTRY_BYTES);
        for bytes in rest.chunks_exact(ENTRY_BYTES) {
            let u16_at = |at| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
            let id = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
            let perm = u32::from(u16_at(2));
            let tag = Tag::decode(u16_at(0), id).ok_or(INVALID)?;
            let before = entries.last().map(|entry| entry.tag);
            if perm & !RWX != 0 || !tag.may_follow(before) {
                return Err(INVALID);
            }
            entries.push(AclEntry { tag, perm });
        }
        let is_whole = entries.last().is_some_and(|last| last.tag == Tag::Other);
        let list = Self { entries };
        if !is_whole || (list.names_any() && list.mask().is_none()) {
            return Err(INVALID);
        }
        Ok(list)
    }

    /// The bytes of the list.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for entry in &self.entries {
            let (tag, id) = entry.tag.encode();
            let perm = u16::try_from(entry.perm).expect("three bits");
            bytes.extend(tag.to_le_bytes());
            bytes.extend(perm.to_le_bytes());
            bytes.extend(id.to_le_bytes());
        }
        bytes
    }

    fn names_any(&self) -> bool {
        let mut tags = self.entries.iter().map(|entry| entry.tag);
        tags.any(|tag| matches!(tag, Tag::User(_) | Tag::Group(_)))
    }

    fn mask(&self) -> Option<u32> {
        self.perm_of(Tag::Mask)
    }

    fn perm_of(&self, tag: Tag) -> Option<u32> {
        let mut entries = self.entries.iter();
        entries
            .find(|entry| entry.tag == tag)
            .map(|entry| entry.perm)
    }

    /// The entry that the group bits of a mode show.
    fn group_class(&self) -> Tag {
        if self.mask().is_some() {
            Tag::Mask
        } else {
            Tag::OwningGroup
        }
    }

    /// The nine permission bits of a mode that go with the list.
    pub(crate) fn mode_bits(&self) -> u32 {
        let perm = |tag| self.perm_of(tag).unwrap_or_default();
        perm(Tag::Owner) << 6 | perm(self.group_class()) << 3 | perm(Tag::Other)
    }

    /// Whether a mode says as much as the list.
    pub(crate) fn is_mode(&self) -> bool {
        self.mask().is_none() && !self.names_any()
    }

    /// The list after chmod(2) to `mode`.
    pub(crate) fn with_mode(&self, mode: u32) -> Self {
        self.map_classes(mode, |_, bits| bits)
    }

    /// The list of a new object, made with `mode` in a directory that has this default list.
    pub(crate) fn of_new(&self, mode: u32) -> Self {
        self.map_classes(mode, |perm, bits| perm & bits)
    }

    /// The list with new permissions of owner, group class and others, made of the old ones and of
    /// the bits of `mode` for that class.
    fn map_classes(&self, mode: u32, new: impl Fn(u32, u32) -> u32) -> Self {
        let group_class = self.group_class();
        let entries = self.entries.iter().map(|entry| {
            let shift = match entry.tag {
                Tag::Owner => 6,
                Tag::Other => 0,
                tag if tag == group_class => 3,
                _ => return *entry,
            };
            AclEntry {
                tag: entry.tag,
                perm: new(entry.perm, mode >> shift & RWX),
            }
        });
        Self {
            entries: entries.collect(),
        }
    }

    /// Whether a process has all of the permissions `wanted`. It is not the owner, and `is_member`
    /// tells its groups. `group` is the object's.
    pub(crate) fn allows(
        &self,
        uid: u32,
        group: u32,
        is_member: impl Fn(u32) -> bool,
        wanted: u32,
    ) -> bool {
        let has = |perm: u32| perm & wanted == wanted;
        let is_masked = self.mask().is_none_or(has);
        let mut is_in_group = false;
        for entry in &self.entries {
            match entry.tag {
                Tag::User(id) if id == uid => return has(entry.perm) && is_masked,
                Tag::OwningGroup | Tag::Group(_) => {
                    let id = match entry.tag {
                        Tag::Group(id) => id,
                        _ => group,
                    };
                    if is_member(id) {
                        is_in_group = true;
                        if has(entry.perm) {
                            return is_masked;
                        }
                    }
                }
                Tag::Other => return !is_in_group && has(entry.perm),
                Tag::Owner | Tag::User(_) | Tag::Mask => {}
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[(Tag, u32)]) -> Acl {
        let entries = entries.iter().map(|&(tag, perm)| AclEntry { tag, perm });
        Acl {
            entries: entries.collect(),
        }
    }

    fn full() -> Acl {
        list(&[
            (Tag::Owner, 7),
            (Tag::User(5), 6),
            (Tag::OwningGroup, 4),
            (Tag::Group(300), 5),
            (Tag::Mask, 5),
            (Tag::Other, 0),
        ])
    }

    #[test]
    fn golden_bytes() {
        let bytes = list(&[
            (Tag::Owner, 6),
            (Tag::User(258), 4),
            (Tag::OwningGroup, 4),
            (Tag::Mask, 6),
            (Tag::Other, 0),
        ]);
        let none = [0xff; 4];
        let want = [
            [2, 0, 0, 0].to_vec(),
            [[1, 0, 6, 0], none].concat(),
            vec![2, 0, 4, 0, 2, 1, 0, 0],
            [[4, 0, 4, 0], none].concat(),
            [[16, 0, 6, 0], none].concat(),
            [[32, 0, 0, 0], none].concat(),
        ];
        assert_eq!(bytes.encode(), want.concat());
        assert_eq!(Acl::decode(&bytes.encode()).unwrap(), bytes);
    }

    #[test]
    fn bytes_that_are_no_list_are_invalid() {
        let good = full().encode();
        for len in 0..good.len() {
            assert!(Acl::decode(&good[..len]).is_err(), "{len}");
        }
        let refused = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            assert!(Acl::decode(&bytes).is_err(), "{at} {byte}");
        };
        refused(0, 1);
        refused(4, 3);
        refused(6, 8);
        refused(12, 1);
        for odd in [
            &[(Tag::Owner, 7), (Tag::OwningGroup, 7)][..],
            &[
                (Tag::Owner, 7),
                (Tag::User(1), 7),
                (Tag::OwningGroup, 7),
                (Tag::Other, 7),
            ],
            &[(Tag::OwningGroup, 7), (Tag::Other, 7)],
            &[(Tag::Owner, 7), (Tag::Mask, 7), (Tag::Other, 7)],
        ] {
            assert!(Acl::decode(&list(odd).encode()).is_err(), "{odd:?}");
        }
        let mut long = vec![(Tag::Owner, 7)];
        long.extend((0..508).map(|id| (Tag::User(id), 7)));
        let end = [(Tag::OwningGroup, 7), (Tag::Mask, 7), (Tag::Other, 7)];
        let of_page = list(&[&long[..long.len() - 1], &end].concat()).encode();
        assert!(of_page.len() <= ACL_BYTES_MAX && Acl::decode(&of_page).is_ok());
        let longer = list(&[&long[..], &end].concat()).encode();
        assert!(longer.len() > ACL_BYTES_MAX && Acl::decode(&longer).is_err());
    }

    #[test]
    fn group_bits_of_a_mode_are_the_mask() {
        assert_eq!(full().mode_bits(), 0o750);
        assert!(!full().is_mode());
        let changed = full().with_mode(0o641);
        assert_eq!(changed.mode_bits(), 0o641);
        assert_eq!(changed.perm_of(Tag::OwningGroup), Some(4));
        let short = list(&[(Tag::Owner, 7), (Tag::OwningGroup, 5), (Tag::Other, 1)]);
        assert!(short.is_mode() && short.mode_bits() == 0o751);
        assert_eq!(short.with_mode(0o640).perm_of(Tag::OwningGroup), Some(4));
        let new = full().of_new(0o666);
        assert_eq!((new.mode_bits(), new.mask()), (0o640, Some(4)));
    }

    #[test]
    fn first_entry_about_a_process_decides_and_the_mask_limits_it() {
        let allows = |uid, groups: &[u32], wanted| {
            full().allows(uid, 100, |group| groups.contains(&group), wanted)
        };
        assert!(allows(5, &[], 4) && !allows(5, &[], 2), "masked");
        assert!(
            !allows(5, &[300], 1),
            "the user's entry counts, not the group's"
        );
        assert!(allows(6, &[100], 4) && !allows(6, &[100], 5));
        assert!(
            allows(6, &[100, 300], 5),
            "any of the groups is enough, but one alone"
        );
        assert!(!allows(6, &[], 4) && allows(6, &[], 0));
        let open = full().with_mode(0o754);
        assert!(open.allows(6, 100, |_| false, 4));
        assert!(
            !open.allows(6, 100, |group| group == 300, 2),
            "members get no more"
        );
    }
}
