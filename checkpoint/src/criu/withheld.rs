//! Memory that CRIU does not write, because it follows the task.
//!
//! CRIU's own way is to have the task put page after page into pipes while it stands still, which takes the longer the more there
//! is. So what is to follow is told before the dump: each process's own memory, all that CRIU itself would let follow, because
//! where a part of a mapping comes later CRIU asks for all of it. A library in CRIU ([`super::relay`]) keeps it from its eyes when it
//! looks for pages, and behind the dump it is noted in the images that it is to be asked for. From where, is
//! [`super::serving`]'s affair.

use super::images::{note_missing, pages_of};
use super::pagemap::{Wanted, present};
use crate::engine::pages::page_size;
use crate::status::Status;
use nix::sys::memfd::{MFdFlags, memfd_create};
use sempa_proto::migration::Failure;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Mappings that the kernel gives to each process.
const OF_THE_KERNEL: [&str; 4] = ["[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]"];
/// Of `VmFlags` in smaps: locked, and of huge pages that are reserved. CRIU lets neither follow.
const NEVER_FOLLOW: [&str; 2] = ["lo", "ht"];

/// What one process keeps for later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    /// Its number here.
    pub(super) pid: i32,
    /// Its number in its own namespace, by which the images know it.
    pub(super) number: u64,
    /// What CRIU is not to see: from, to.
    areas: Vec<(u64, u64)>,
    /// Where pages are in it.
    pub(super) pages: Vec<(u64, u64)>,
}

/// What the processes of a task keep for later. None of them may run from now on.
#[derive(Clone, Debug, Default)]
pub(super) struct Withheld {
    pub(super) processes: Vec<Kept>,
}

/// Whether the kernel tells what has to be known.
///
/// # Errors
/// Its answer.
pub(super) fn possible() -> io::Result<()> {
    let map = File::open("/proc/self/pagemap")?;
    present(&map, (page_size(), 2 * page_size()), Wanted::All).map(drop)
}

impl Withheld {
    /// Chooses what follows of these processes, which stand still.
    ///
    /// # Errors
    /// The kernel does not tell, or one of them is gone.
    pub(super) fn of(processes: &[i32]) -> io::Result<Withheld> {
        let kept = processes
            .iter()
            .map(|pid| Kept::of(*pid))
            .filter(|kept| !matches!(kept, Ok(None)));
        Ok(Withheld {
            processes: kept
                .filter_map(Result::transpose)
                .collect::<io::Result<_>>()?,
        })
    }

    /// What CRIU is not to see, as the library reads it: process, from, to, in their order.
    ///
    /// # Errors
    /// There is no descriptor.
    pub(super) fn list(&self) -> io::Result<OwnedFd> {
        let list = memfd_create(c"sempa-withheld", MFdFlags::MFD_CLOEXEC)?;
        let of = |kept: &Kept| -> Vec<[u64; 3]> {
            kept.areas
                .iter()
                .map(|(start, end)| [kept.pid.cast_unsigned().into(), *start, *end])
                .collect()
        };
        let bytes = self
            .processes
            .iter()
            .flat_map(of)
            .flatten()
            .flat_map(u64::to_ne_bytes)
            .collect::<Vec<u8>>();
        File::from(list.try_clone()?).write_all(&bytes)?;
        Ok(list)
    }

    /// Notes in the images in this directory what is to be asked for.
    ///
    /// # Errors
    /// They are not whole, or CRIU has written what it was not to see.
    pub(super) fn note_in(&self, dir: &Path) -> Result<(), Failure> {
        for kept in &self.processes {
            for written in pages_of(dir, kept.number)? {
                let end = written
                    .address
                    .saturating_add(written.number.saturating_mul(page_size()));
                if kept
                    .areas
                    .iter()
                    .any(|(from, to)| written.address < *to && end > *from)
                {
                    return Err(Failure::Engine(
                        "it has written memory that was to follow the task".into(),
                    ));
                }
            }
            note_missing(dir, kept.number, &kept.pages)?;
        }
        Ok(())
    }

    /// True if this page is kept by the process of this number in the images.
    pub(super) fn has(&self, number: u64, address: u64) -> bool {
        self.stretch(number, address).is_some()
    }

    /// The process that keeps this address, by its number here, and the end of the stretch.
    pub(super) fn stretch(&self, number: u64, address: u64) -> Option<(i32, u64)> {
        let kept = self.processes.iter().find(|kept| kept.number == number)?;
        let behind = kept.pages.partition_point(|(start, _)| *start <= address);
        let (_, end) = kept.pages.get(behind.checked_sub(1)?)?;
        (address < *end).then_some((kept.pid, *end))
    }
}

impl Kept {
    /// `None`: all of it is written.
    fn of(pid: i32) -> io::Result<Option<Kept>> {
        let number = number(pid).ok_or_else(gone)?;
        let areas = own_areas(pid)?;
        // One that has ended has no memory, and says nothing of it.
        if areas.is_empty() {
            return Ok(None);
        }
        let pages = pages(pid, &areas, Wanted::All)?;
        Ok(Some(Kept {
            pid,
            number,
            areas,
            pages,
        }))
    }
}

fn gone() -> io::Error {
    io::Error::from(io::ErrorKind::NotFound)
}

/// The number of a process in its own namespace. `None`: it is gone.
pub(super) fn number(pid: i32) -> Option<u64> {
    Status::of(pid)?
        .field("NSpid")?
        .split_whitespace()
        .last()?
        .parse()
        .ok()
}

/// A process's own memory that can follow it.
///
/// # Errors
/// It is gone, or the kernel does not tell.
pub(super) fn own_areas(pid: i32) -> io::Result<Vec<(u64, u64)>> {
    let status = Status::of(pid).ok_or_else(gone)?;
    let some = |name| {
        status
            .number::<u64>(name)
            .is_some_and(|kilobytes| kilobytes > 0)
    };
    // To tell the flags of mappings the kernel looks at every page, so it is not asked where none can have these.
    let file = if some("VmLck") || some("HugetlbPages") {
        "smaps"
    } else {
        "maps"
    };
    Ok(areas(&std::fs::read_to_string(format!(
        "/proc/{pid}/{file}"
    ))?))
}

/// Where pages are in these areas.
///
/// # Errors
/// As for [`own_areas`].
pub(super) fn pages(pid: i32, areas: &[(u64, u64)], wanted: Wanted) -> io::Result<Vec<(u64, u64)>> {
    let map = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut pages = Vec::new();
    for area in areas {
        pages.extend(present(&map, *area, wanted)?);
    }
    Ok(pages)
}

/// The process's own memory that can follow, in /proc/PID/maps or smaps.
fn areas(maps: &str) -> Vec<(u64, u64)> {
    let mut areas = Vec::new();
    let mut is_last = false;
    for line in maps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if is_last
                && flags
                    .split_whitespace()
                    .any(|flag| NEVER_FOLLOW.contains(&flag))
            {
                areas.pop();
            }
        } else if let Some((start, end, rest)) = mapping(line) {
            is_last = is_own(rest);
            if is_last {
                areas.push((start, end));
            }
        }
    }
    areas
}

/// A line that begins a mapping: from, to, what is said of it.
fn mapping(line: &str) -> Option<(u64, u64, &str)> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let number = |hex| u64::from_str_radix(hex, 16).ok();
    Some((number(start)?, number(end)?, rest))
}

/// True for private memory of no file, by what is behind the addresses.
fn is_own(rest: &str) -> bool {
    // perms offset device inode name
    let mut fields = rest.split_whitespace();
    let (perms, inode) = (fields.next().unwrap_or_default(), fields.nth(2));
    let name = fields.next().unwrap_or_default();
    perms.ends_with('p') && inode == Some("0") && !OF_THE_KERNEL.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
5566f000-5567f000 r-xp 00000000 fe:01 1234                       /usr/bin/a program
56000000-56100000 rw-p 00000000 00:00 0                          [heap]
7f000000-7f100000 rw-s 00000000 00:1a 77                         /data/shared table
7f200000-7f300000 rw-p 00000000 00:00 0 \n\
7f300000-7f400000 r--p 00000000 00:00 0                          [anon:a name]
7f400000-7f410000 rw-p 00000000 00:00 0 \n\
7f500000-7f600000 ---p 00000000 00:00 0 \n\
7f600000-7f700000 rw-s 00000000 00:01 5                          /dev/zero (deleted)
7f800000-7f900000 rw-p 00001000 fe:01 1234                       /usr/lib/a
7fff0000-7fff8000 rw-p 00000000 00:00 0                          [stack]
7fffa000-7fffc000 r--p 00000000 00:00 0                          [vvar]
7fffc000-7fffe000 r-xp 00000000 00:00 0                          [vdso]
";

    #[test]
    fn what_follows_is_the_processs_own() {
        let starts: Vec<u64> = areas(MAPS).iter().map(|(start, _)| *start).collect();
        assert_eq!(
            starts,
            [
                0x5600_0000,
                0x7f20_0000,
                0x7f30_0000,
                0x7f40_0000,
                0x7f50_0000,
                0x7fff_0000
            ]
        );
    }

    #[test]
    fn what_is_locked_or_of_reserved_huge_pages_does_not_follow() {
        let smaps = "\
7f200000-7f300000 rw-p 00000000 00:00 0 \nSize: 1024 kB\nVmFlags: rd wr mr mw me lo ac\n\
7f300000-7f400000 rw-p 00000000 00:00 0 \nVmFlags: rd wr mr mw me ac\n\
7f400000-7f410000 rw-p 00000000 00:00 0 \nVmFlags: rd wr lo\n\
7f500000-7f600000 rw-p 00000000 00:00 0 \nVmFlags: rd ht\n";
        assert_eq!(areas(smaps), [(0x7f30_0000, 0x7f40_0000)]);
    }

    #[test]
    fn stretches_are_found_by_any_of_their_addresses() {
        let kept = Kept {
            pid: 77,
            number: 2,
            areas: vec![(0x1000, 0x9000)],
            pages: vec![(0x1000, 0x3000), (0x5000, 0x6000)],
        };
        let withheld = Withheld {
            processes: vec![kept],
        };
        let found = [0xfff, 0x1000, 0x2fff, 0x3000, 0x5000, 0x6000]
            .map(|address| withheld.stretch(2, address));
        assert_eq!(
            found,
            [
                None,
                Some((77, 0x3000)),
                Some((77, 0x3000)),
                None,
                Some((77, 0x6000)),
                None
            ]
        );
        assert!(!withheld.has(3, 0x1000));
    }

    #[test]
    fn a_processs_own_memory_is_found_where_it_is() {
        let memory = vec![7_u8; 4 << 20];
        let own = Withheld::of(&[std::process::id() as i32]).expect("it is there");
        let (start, end) = (
            memory.as_ptr() as u64 & !(page_size() - 1),
            memory.as_ptr() as u64 + (4 << 20) - 1,
        );
        let number = own.processes[0].number;
        assert!(own.has(number, start) && own.has(number, end), "{own:?}");
    }
}
