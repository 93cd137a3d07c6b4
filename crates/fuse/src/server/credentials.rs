//! The process that sent a request.

use ramet_fs::{Caller, Capabilities, Credentials, NOBODY};

use crate::protocol::Header;

/// The process that sent a request, by the header of the request.
#[derive(Clone, Copy)]
pub(crate) struct Requester {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) pid: u32,
}

impl From<&Header> for Requester {
    fn from(header: &Header) -> Self {
        Self {
            uid: header.uid,
            gid: header.gid,
            pid: header.pid,
        }
    }
}

/// The user of a request. A request on a mount that may be idmapped does not name it.
pub(crate) fn user_of(requester: Requester) -> u32 {
    match requester.uid {
        NOBODY => caller_of(requester).uid,
        uid => uid,
    }
}

/// User, groups and capabilities of a process. They come from the process table; a process that
/// cannot be seen there has the rights of the user that the request names, if it names one.
pub(crate) fn caller_of(requester: Requester) -> Caller {
    let status = status_of(requester.pid);
    let is_ours = || is_of_our_user_namespace(requester.pid);
    caller_in(status.as_deref(), is_ours, requester)
}

/// `is_ours` tells whether the process is in the user namespace of this one, if that can be seen:
/// in any other namespace its capabilities say nothing.
fn caller_in(
    status: Option<&str>,
    is_ours: impl FnOnce() -> Option<bool>,
    requester: Requester,
) -> Caller {
    let (uid, gid) = ids_in(status, requester);
    let capabilities = match is_ours() {
        Some(true) => capabilities_in(status),
        Some(false) => None,
        None if uid == 0 => capabilities_in(status).or(Some(Capabilities::ALL)),
        None => None,
    };
    Caller {
        groups: status.map(groups_in).unwrap_or_default(),
        capabilities: capabilities.unwrap_or_default(),
        ..Caller::user(uid, gid)
    }
}

/// User and group that count for file systems. A request on a mount that may be idmapped names them
/// only where it creates an inode.
fn ids_in(status: Option<&str>, requester: Requester) -> (u32, u32) {
    // Real, effective, saved and file system id.
    let fourth = |name| {
        let ids = status.map(|status| field(status, name))?;
        ids.split_whitespace().nth(3)?.parse().ok()
    };
    let or = |named: u32, name| {
        if named == NOBODY {
            fourth(name).unwrap_or(NOBODY)
        } else {
            named
        }
    };
    (or(requester.uid, "Uid:"), or(requester.gid, "Gid:"))
}

fn capabilities_in(status: Option<&str>) -> Option<Capabilities> {
    let bits = field(status?, "CapEff:").trim();
    u64::from_str_radix(bits, 16).ok().map(Capabilities)
}

/// Whether a process has the user namespace of this one; `None` if that cannot be seen.
fn is_of_our_user_namespace(pid: u32) -> Option<bool> {
    if pid == 0 {
        return None;
    }
    let ours = std::fs::read_link("/proc/self/ns/user").ok()?;
    let its = std::fs::read_link(format!("/proc/{pid}/ns/user")).ok()?;
    Some(ours == its)
}

/// Groups and capability of a process, which decide on setuid and setgid of a file that the process
/// changes. Its capabilities count as those of [`caller_of`] do. A process that cannot be seen has
/// no supplementary groups.
pub(crate) fn credentials_of(requester: Requester) -> Credentials {
    credentials_in(caller_of(requester))
}

fn credentials_in(caller: Caller) -> Credentials {
    let mut groups = caller.groups;
    groups.push(caller.gid);
    Credentials {
        has_fsetid: caller.capabilities.have(Capabilities::FSETID),
        groups,
    }
}

/// The same for a process of which the kernel has told that it has no `CAP_FSETID`.
pub(crate) fn credentials_without_fsetid(requester: Requester) -> Credentials {
    Credentials {
        has_fsetid: false,
        ..credentials_of(requester)
    }
}

/// The text of `/proc/PID/status`, if the process table shows the process. The thread of a request
/// waits for the answer, so that its entry is its own.
fn status_of(pid: u32) -> Option<String> {
    if pid == 0 {
        return None;
    }
    std::fs::read_to_string(format!("/proc/{pid}/status")).ok()
}

fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let mut lines = status.lines();
    lines
        .find_map(|line| line.strip_prefix(name))
        .unwrap_or_default()
}

fn groups_in(status: &str) -> Vec<u32> {
    field(status, "Groups:")
        .split_whitespace()
        .filter_map(|group| group.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_this_process_are_found() {
        let expected: Vec<u32> = rustix::process::getgroups()
            .unwrap()
            .into_iter()
            .map(rustix::process::Gid::as_raw)
            .collect();
        let requester = |uid, pid| Requester { uid, gid: 7, pid };
        let groups_of = |pid| caller_of(requester(NOBODY, pid)).groups;
        assert_eq!(groups_of(std::process::id()), expected);
        assert!(groups_of(0).is_empty());
        let here = credentials_of(requester(0, std::process::id()));
        assert_eq!(here.groups.split_last(), Some((&7, &expected[..])));
        let unseen = |uid| credentials_of(requester(uid, 0));
        assert_eq!(unseen(5).groups, [7]);
        assert_eq!([0, 5].map(|uid| unseen(uid).has_fsetid), [true, false]);
    }

    #[test]
    fn user_that_a_request_does_not_name_is_that_of_its_process() {
        let user = |uid, pid| user_of(Requester { uid, gid: 7, pid });
        let here = rustix::process::geteuid().as_raw();
        assert_eq!(user(NOBODY, std::process::id()), here);
        assert_eq!(user(5, std::process::id()), 5);
        assert_eq!(user(NOBODY, 0), NOBODY, "its process is not seen here");
    }

    #[test]
    fn user_is_the_request_s_or_that_of_the_file_system() {
        let status = "Uid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t9 \nCapEff:\t2\n";
        let told = |status, is_ours: Option<bool>, uid| {
            let requester = Requester {
                uid,
                gid: uid,
                pid: 1,
            };
            let caller = caller_in(status, || is_ours, requester);
            (caller.uid, caller.gid, caller.capabilities.0)
        };
        let here = Some(true);
        assert_eq!(told(Some(status), here, NOBODY), (4, 8, 2));
        assert_eq!(told(Some(status), here, 77), (77, 77, 2));
        assert_eq!(told(Some(status), Some(false), NOBODY), (4, 8, 0));
        assert_eq!(told(Some(status), Some(false), 0), (0, 0, 0));
        assert_eq!(told(Some(status), None, 77), (77, 77, 0));
        assert_eq!(told(Some(status), None, 0), (0, 0, 2));
        assert_eq!(told(None, None, 0), (0, 0, u64::MAX));
        assert_eq!(told(None, None, 77), (77, 77, 0));
        assert_eq!(told(None, None, NOBODY), (NOBODY, NOBODY, 0));
        let caller = caller_of(Requester {
            uid: NOBODY,
            gid: NOBODY,
            pid: std::process::id(),
        });
        assert_eq!(caller.uid, rustix::process::geteuid().as_raw());
    }

    #[test]
    fn capabilities_decide_about_fsetid_and_the_user_does_not() {
        let told = |uid, is_ours, capabilities| {
            let status = format!("Name:\tx\nGroups:\t4 24 \nCapEff:\t{capabilities}\n");
            let requester = Requester {
                uid,
                gid: 7,
                pid: 1,
            };
            credentials_in(caller_in(Some(&status), || is_ours, requester))
        };
        let here = Some(true);
        let root = told(0, here, "00000000a80425eb");
        assert_eq!((root.has_fsetid, root.groups), (false, vec![4, 24, 7]));
        let fsetid = "0000000000000010";
        assert!(told(5, here, fsetid).has_fsetid);
        // Each user may make a namespace and have all capabilities in it.
        let elsewhere = [0, 5].map(|uid| told(uid, Some(false), fsetid).has_fsetid);
        assert_eq!(elsewhere, [false, false]);
        let unseen = [0, 5].map(|uid| told(uid, None, fsetid).has_fsetid);
        assert_eq!(unseen, [true, false]);
    }
}
