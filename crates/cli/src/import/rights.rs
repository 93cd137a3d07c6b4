//! The capabilities of this process.

use ramet_fs::Capabilities;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Rights {
    /// Bits of capabilities(7).
    pub capabilities: u64,
}

impl Rights {
    /// Those of this process; none if they cannot be read.
    pub fn of_process() -> Rights {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        Rights {
            capabilities: effective(&status).unwrap_or_default(),
        }
    }

    /// Whether devices may be made.
    pub fn makes_devices(self) -> bool {
        Capabilities(self.capabilities).have(Capabilities::MKNOD)
    }

    /// Whether objects can have any owner and any attribute.
    pub fn gives_all(self) -> bool {
        /// All capabilities that the kernel knew first: those up to CAP_AUDIT_CONTROL.
        const ALL: u64 = 0x7fff_ffff;
        self.capabilities & ALL == ALL
    }
}

fn effective(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_those_that_are_effective() {
        let status = "CapPrm:\t0000000000000001\nCapEff:\t0000000008000000\n";
        assert_eq!(effective(status), Some(1 << 27));
        let rights = Rights {
            capabilities: 1 << 27,
        };
        assert!(rights.makes_devices() && !rights.gives_all());
        assert_eq!(effective("CapEff:\tx\n"), None);
    }
}
