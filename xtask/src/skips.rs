//! Decides which tests of the system tier this machine cannot run, and for which reason.
//!
//! Such a test is excluded before the run and reported as skipped. A test that is started
//! nevertheless panics with the same reason (`sempa_tests::needs`).

use procfs::{Current, Meminfo};
use sempa_tests::{limits, logind, pvm_examples, requirements, screen};
use std::collections::BTreeMap;
use std::path::Path;

/// Something that a test needs in addition to the programs of this build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TestNeed {
    Root,
    /// Root, namespaces, and the programs that the testbed calls.
    Hosts,
    /// A CRIU that works on this kernel.
    Criu,
    /// A program, given as (name or path, Debian package that installs it).
    Program(&'static str, &'static str),
    /// The sources of PVM's examples, and the compilers for them.
    Examples,
    Screen,
    /// A bus for the fake logind.
    Bus,
    /// Control groups that limit processors.
    ProcessorGroups,
    /// Control groups that limit memory.
    MemoryGroups,
    /// Control groups of version 2, which freeze processes.
    Freezer,
    /// A `/tmp` on a disk, not in memory.
    Disk,
    /// Free memory in MiB, as (for the default sizes, for the sizes with `SEMPA_TEST_FULL`).
    FreeMemory(u64, u64),
}

use TestNeed::{
    Bus, Criu, Disk, Examples, Freezer, Hosts, MemoryGroups, ProcessorGroups, Root, Screen,
};

const GCC: TestNeed = TestNeed::Program("gcc", "gcc");
const GFORTRAN: TestNeed = TestNeed::Program("gfortran", "gfortran");
const MAKE: TestNeed = TestNeed::Program("make", "make");
const PKG_CONFIG: TestNeed = TestNeed::Program("pkg-config", "pkg-config");
const PYTHON: TestNeed = TestNeed::Program("python3", "python3");
const PVM: TestNeed = TestNeed::Program("/usr/bin/pvm", "pvm");
const PVM_EXAMPLES: TestNeed = TestNeed::Program("/usr/bin/hello.pvm", "pvm-examples");
const PVM_DEV: TestNeed = TestNeed::Program("/usr/include/pvm3.h", "pvm-dev");
const TABLIX: TestNeed = TestNeed::Program("/usr/bin/tablix2", "tablix2");
const NETPIPE: TestNeed = TestNeed::Program("/usr/bin/NPpvm", "netpipe-pvm");
const SLSH: TestNeed = TestNeed::Program("/usr/bin/slsh", "slsh");

/// The needs of ignored tests, as (binary, test, needs). The binary has nextest's form; the part
/// before `::` alone stands for all binaries of a package. The test is a part of the test's name,
/// or empty for all tests.
const NEEDS: &[(&str, &str, &[TestNeed])] = &[
    ("sempa-tests", "", &[Hosts]),
    ("sempa-tests::balance", "", &[Criu, ProcessorGroups]),
    ("sempa-tests::checkpoint", "", &[Criu]),
    ("sempa-tests::checkpoint_faults", "", &[Criu]),
    ("sempa-tests::conformance", "", &[PVM, PVM_DEV, GCC]),
    ("sempa-tests::copies", "", &[Criu]),
    ("sempa-tests::drain", "", &[Criu]),
    ("sempa-tests::examples", "", &[PVM, PVM_EXAMPLES, Examples]),
    ("sempa-tests::examples", "xep", &[Screen]),
    ("sempa-tests::examples", "tablix", &[TABLIX]),
    ("sempa-tests::examples", "other_packages", &[NETPIPE, SLSH]),
    ("sempa-tests::failed_moves", "", &[Criu]),
    ("sempa-tests::finish_right", "", &[Criu]),
    ("sempa-tests::finish_right", "python", &[PYTHON]),
    ("sempa-tests::finish_right", "fortran", &[GFORTRAN]),
    ("sempa-tests::finish_right", "tablix", &[TABLIX]),
    ("sempa-tests::fortran", "", &[GFORTRAN]),
    ("sempa-tests::groups", "", &[Criu, GCC]),
    ("sempa-tests::groups", "debian", &[PVM, PVM_EXAMPLES]),
    ("sempa-tests::groups", "pvms_own", &[PVM, PVM_EXAMPLES]),
    ("sempa-tests::groups", "tracer", &[PVM]),
    ("sempa-tests::guests", "", &[Criu]),
    (
        "sempa-tests::limits",
        "giant",
        &[TestNeed::FreeMemory(2 << 10, 14 << 10)],
    ),
    (
        "sempa-tests::limits",
        "floods",
        &[TestNeed::FreeMemory(2 << 10, 6 << 10)],
    ),
    ("sempa-tests::loss", "", &[Criu]),
    ("sempa-tests::lying_engines", "", &[Criu]),
    ("sempa-tests::lying_moves", "", &[Criu]),
    ("sempa-tests::lying_moves", "group", &[MemoryGroups]),
    ("sempa-tests::move_faults", "", &[Criu]),
    ("sempa-tests::on_the_way", "", &[Criu]),
    ("sempa-tests::on_the_way", "disk", &[Disk]),
    ("sempa-tests::outsiders", "", &[Criu]),
    ("sempa-tests::own_checkpoints", "", &[Criu]),
    ("sempa-tests::own_examples", "", &[MAKE, PKG_CONFIG, GCC]),
    ("sempa-tests::own_examples", "fortran", &[GFORTRAN]),
    ("sempa-tests::owner", "", &[Criu]),
    ("sempa-tests::owner_first", "", &[Criu]),
    ("sempa-tests::owner_policy", "", &[Criu]),
    ("sempa-tests::owner_policy", "logind", &[Bus]),
    ("sempa-tests::post_copy", "", &[Criu]),
    ("sempa-tests::pre_copy", "", &[Criu]),
    ("sempa-tests::routes", "", &[Criu]),
    ("sempa-tests::soak", "", &[Criu]),
    ("sempa-tests::suspend", "", &[Criu]),
    ("sempa-tests::talk", "", &[Criu]),
    ("pvm-console::same_as_pvm", "", &[PVM, PVM_EXAMPLES]),
    ("pvm-console::three_hosts", "", &[Hosts, PVM]),
    ("pvm-console", "", &[]),
    ("libpvm", "", &[]),
    ("libpvm::halt", "debian", &[PVM, PVM_EXAMPLES]),
    ("libpvm::halt", "sigterm", &[GCC]),
    ("pvm3-capi", "", &[GCC]),
    ("pvm3-capi::abi", "debian", &[PVM, PVM_DEV]),
    ("pvm3-capi::programs", "debian", &[PVM_DEV]),
    ("pvm3-capi::programs", "root", &[Root]),
    ("gpvm3", "", &[GCC]),
    ("checkpoint", "", &[PYTHON]),
    ("pvmd", "", &[]),
    ("pvmd", "disk", &[Disk]),
    ("pvmd::daemon", "", &[Root]),
    ("pvm-tasker", "", &[Criu, GCC]),
    ("pvm-tasker::bin/pvm-tasker", "", &[PYTHON]),
    ("pvm-tasker::hold", "freez", &[Freezer]),
    ("pvm-tasker::kinds", "python", &[PYTHON]),
    ("pvm-tasker::kinds", "asyncio", &[PYTHON]),
    ("pvm-tasker::kinds", "fortran", &[GFORTRAN]),
];

/// Returns the needs of an ignored test. If the table does not have its binary, the test needs
/// hosts.
fn needs_of(binary: &str, test: &str) -> Vec<TestNeed> {
    let package = binary.split("::").next().unwrap_or(binary);
    let rows = NEEDS
        .iter()
        .filter(|(of, part, _)| (*of == binary || *of == package) && test.contains(part));
    let needs: Vec<TestNeed> = rows
        .flat_map(|(_, _, needs)| needs.iter().copied())
        .collect();
    let known = NEEDS
        .iter()
        .any(|(of, _, _)| *of == binary || *of == package);
    if known { needs } else { vec![Hosts] }
}

/// Returns why a need is not met on this machine; `None` if it is met. `criu` is the reason why
/// CRIU does not work, as found by the set-up. `full` is true if tests run with `SEMPA_TEST_FULL`.
fn lack(need: TestNeed, criu: Option<&str>, full: bool) -> Option<String> {
    match need {
        TestNeed::FreeMemory(usual, all) => {
            let wanted = if full { all } else { usual };
            let free = free_mebibytes();
            (free < wanted).then(|| format!("{wanted} MiB of free memory are needed, not {free}"))
        }
        TestNeed::Root => (!requirements::is_root()).then(|| "this is not root".to_string()),
        TestNeed::Hosts => requirements::lacks(),
        TestNeed::Criu => criu.map(String::from),
        TestNeed::Program(name, package) => {
            let found = if name.starts_with('/') {
                Path::new(name).exists()
            } else {
                requirements::find_in_path(name).is_some()
            };
            (!found).then(|| format!("{name} is missing: install {package}"))
        }
        TestNeed::Examples => pvm_examples::lacks(),
        TestNeed::Screen => screen::lacks(),
        TestNeed::Bus => logind::lacks(),
        TestNeed::ProcessorGroups => limits::lacks(),
        TestNeed::MemoryGroups => limits::lacks_memory(),
        TestNeed::Freezer => {
            let mounts = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
            sempa_proto::cgroup::find_mount_point(&mounts, None)
                .is_none()
                .then(|| "control groups of version 2 are not mounted".to_string())
        }
        TestNeed::Disk => requirements::lacks_disk(),
    }
}

/// Returns the memory in MiB that the kernel could still give to programs.
fn free_mebibytes() -> u64 {
    let memory = Meminfo::current().ok();
    memory.and_then(|memory| memory.mem_available).unwrap_or(0) >> 20
}

/// Decides which tests are skipped. Each need is checked only once.
pub(crate) struct SkipDecider {
    criu: Option<String>,
    full: bool,
    lacks_by_need: BTreeMap<TestNeed, Option<String>>,
}

impl SkipDecider {
    /// `criu` is the reason why CRIU does not work; `None` if it works. `full` is true if tests run
    /// with `SEMPA_TEST_FULL`.
    pub(crate) fn new(criu: Option<String>, full: bool) -> SkipDecider {
        SkipDecider {
            criu,
            full,
            lacks_by_need: BTreeMap::new(),
        }
    }

    /// Returns the reason to skip an ignored test; `None` if the machine meets all its needs.
    pub(crate) fn reason(&mut self, binary: &str, test: &str) -> Option<String> {
        needs_of(binary, test).into_iter().find_map(|need| {
            self.lacks_by_need
                .entry(need)
                .or_insert_with(|| lack(need, self.criu.as_deref(), self.full))
                .clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A test has the needs of its package, of its binary and of its name.
    #[test]
    fn needs_of_package_binary_and_name_add_up() {
        assert_eq!(
            needs_of("sempa-tests::finish_right", "python_tasks"),
            [Hosts, Criu, PYTHON]
        );
        assert_eq!(needs_of("pvm-tasker::kinds", "x"), [Criu, GCC]);
        assert_eq!(needs_of("pvm-console::terminal", "x"), [Hosts; 0]);
    }

    /// A binary that is not in the table needs hosts.
    #[test]
    fn unknown_binary_needs_hosts() {
        assert_eq!(needs_of("pvm-other::it", "x"), [Hosts]);
    }

    /// Without CRIU the tests of migrations are skipped, with the reason from the set-up.
    #[test]
    fn missing_criu_skips_moves_only() {
        let mut skips = SkipDecider::new(Some("no CRIU".into()), false);
        let reason = |skips: &mut SkipDecider, name| skips.reason(name, "x");
        assert_eq!(
            reason(&mut skips, "pvm-tasker::moves").as_deref(),
            Some("no CRIU")
        );
        assert_eq!(reason(&mut skips, "libpvm::api"), None);
    }
}
