//! Decides which tests of the system tier this machine cannot run, and for which reason.
//!
//! Such a test is excluded before the run and reported as skipped. If the test is started
//! nevertheless, it panics with the same reason (`sempa_tests::needs`).

use procfs::{Current, Meminfo};
use sempa_tests::source_packages::{FASTDNAML, SourcePackage};
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
    /// An installed file or program, given as (path, or name in PATH; Debian package that installs
    /// it).
    Program(&'static str, &'static str),
    /// A source package of Debian, which the set-up fetches.
    Source(SourcePackage),
    /// The sources of PVM's examples, and the compilers for them.
    Examples,
    /// The requirements of tests with a screen (`sempa_tests::screen`).
    Screen,
    /// A D-Bus bus for the fake logind.
    Bus,
    /// Control groups that limit processors.
    ProcessorGroups,
    /// Control groups that limit memory.
    MemoryGroups,
    /// Control groups of version 2, with which the tasker freezes tasks.
    Freezer,
    /// A `/tmp` on a disk, because a file system in memory behaves differently.
    Disk,
    /// Free memory in MiB, as (amount for the default sizes, amount for the sizes with
    /// `SEMPA_TEST_FULL`).
    FreeMemory(u64, u64),
    /// Processors on which this process may run.
    Processors(usize),
    /// `SEMPA_TEST_FULL`, for tests of which other tests are the representatives.
    FullRun,
}

use TestNeed::{
    Bus, Criu, Disk, Examples, Freezer, FullRun, Hosts, MemoryGroups, ProcessorGroups, Root, Screen,
};

const GCC: TestNeed = TestNeed::Program("gcc", "gcc");
const GXX: TestNeed = TestNeed::Program("g++", "g++");
const VALGRIND: TestNeed = TestNeed::Program("valgrind", "valgrind");
const GFORTRAN: TestNeed = TestNeed::Program("gfortran", "gfortran");
const MAKE: TestNeed = TestNeed::Program("make", "make");
const PKG_CONFIG: TestNeed = TestNeed::Program("pkg-config", "pkg-config");
const PYTHON: TestNeed = TestNeed::Program("python3", "python3");
const PVM: TestNeed = TestNeed::Program("/usr/bin/pvm", "pvm");
const LIBPVM: TestNeed = TestNeed::Program("/usr/lib/x86_64-linux-gnu/libpvm3.so.3", "libpvm3");
const IMAKE: TestNeed = TestNeed::Program("xmkmf", "xutils-dev");
const PVM_EXAMPLES: TestNeed = TestNeed::Program("/usr/bin/hello.pvm", "pvm-examples");
const PVM_DEV: TestNeed = TestNeed::Program("/usr/include/pvm3.h", "pvm-dev");
const TABLIX: TestNeed = TestNeed::Program("/usr/bin/tablix2", "tablix2");
const NETPIPE: TestNeed = TestNeed::Program("/usr/bin/NPpvm", "netpipe-pvm");
const SLSH: TestNeed = TestNeed::Program("/usr/bin/slsh", "slsh");

/// The needs of ignored tests, as (binary, test, needs). The binary has nextest's form; the part
/// before `::` alone stands for all binaries of a package. The test is a part of the test's name,
/// or empty for all tests.
const TEST_NEEDS: &[(&str, &str, &[TestNeed])] = &[
    ("sempa-tests", "", &[Hosts]),
    ("sempa-tests::balance", "", &[Criu, ProcessorGroups]),
    ("sempa-tests::causal_order", "", &[GCC]),
    ("sempa-tests::causal_order", "migrations", &[Criu]),
    ("sempa-tests::causal_order", "rollback", &[Criu]),
    ("sempa-tests::causal_order", "pvm_keeps", &[PVM, PVM_DEV]),
    ("sempa-tests::checkpoint", "", &[Criu]),
    ("sempa-tests::checkpoint_faults", "", &[Criu]),
    ("sempa-tests::conformance", "", &[PVM, PVM_DEV, GCC]),
    ("sempa-tests::checkpoint_copies", "", &[Criu]),
    ("sempa-tests::drain", "", &[Criu]),
    ("sempa-tests::examples", "", &[PVM, PVM_EXAMPLES, Examples]),
    ("sempa-tests::examples", "xep", &[Screen]),
    ("sempa-tests::examples", "tablix", &[TABLIX]),
    ("sempa-tests::examples", "other_packages", &[NETPIPE, SLSH]),
    ("sempa-tests::failed_migrations", "", &[Criu]),
    ("sempa-tests::correct_results", "", &[Criu]),
    ("sempa-tests::correct_results", "python", &[PYTHON]),
    ("sempa-tests::correct_results", "fortran", &[GFORTRAN]),
    ("sempa-tests::correct_results", "tablix", &[TABLIX]),
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
    ("sempa-tests::lost_work", "", &[Criu]),
    ("sempa-tests::damaged_checkpoints", "", &[Criu]),
    ("sempa-tests::job_claims", "", &[Criu]),
    ("sempa-tests::liveness", "one_copy", &[Criu]),
    ("sempa-tests::lost_output", "rollback", &[Criu]),
    ("sempa-tests::leftovers", "control_group", &[Freezer]),
    ("sempa-tests::checkpoint_engine_faults", "", &[Criu]),
    ("sempa-tests::migration_engine_faults", "", &[Criu]),
    (
        "sempa-tests::migration_engine_faults",
        "group",
        &[MemoryGroups],
    ),
    ("sempa-tests::migration_faults", "", &[Criu]),
    ("sempa-tests::image_transfer", "", &[Criu]),
    ("sempa-tests::image_transfer", "disk", &[Disk]),
    ("sempa-tests::other_jobs", "", &[Criu]),
    ("sempa-tests::self_checkpoints", "", &[Criu]),
    (
        "sempa-tests::example_programs",
        "",
        &[MAKE, PKG_CONFIG, GCC],
    ),
    ("sempa-tests::example_programs", "fortran", &[GFORTRAN]),
    ("sempa-tests::other_pvm", "", &[GCC]),
    ("sempa-tests::other_pvm", "library_of", &[LIBPVM]),
    ("sempa-tests::other_pvm", "daemon_of", &[PVM]),
    ("sempa-tests::owner", "", &[Criu]),
    ("sempa-tests::owner_protection_faults", "", &[Criu]),
    ("sempa-tests::owner_policy", "", &[Criu]),
    ("sempa-tests::owner_policy", "logind", &[Bus]),
    ("sempa-tests::post_copy", "", &[Criu]),
    ("sempa-tests::pre_copy", "", &[Criu]),
    ("sempa-tests::process_ids", "of_three_hosts", &[Criu]),
    ("sempa-tests::process_ids", "restarted", &[Criu]),
    ("sempa-tests::python", "", &[PYTHON]),
    ("sempa-tests::python", "migrat", &[Criu]),
    ("sempa-tests::python", "python_and_c", &[GCC]),
    ("sempa-tests::python", "ring", &[GCC]),
    ("sempa-tests::python", "type_stubs", &[FullRun]),
    ("sempa-tests::pvm_root", "", &[MAKE, GCC]),
    ("sempa-tests::pvm_root", "examples", &[Examples]),
    ("sempa-tests::pvm_root", "imake", &[IMAKE]),
    ("sempa-tests::routes", "", &[Criu]),
    ("sempa-tests::soak", "", &[Criu]),
    ("sempa-tests::suspend", "", &[Criu]),
    ("sempa-tests::all_to_all", "", &[Criu]),
    ("sempa-tests::admin", "drained", &[Criu]),
    ("sempa-tests::missing_service", "", &[Criu]),
    ("sempa-tests::tasker_service", "", &[Criu]),
    ("sempa-tests::three_users", "", &[Criu, TABLIX]),
    ("sempa-tests::work", "migrated", &[Criu]),
    ("sempa-tests::work_c", "", &[GCC]),
    ("sempa-tests::broker", "", &[GCC]),
    ("sempa-tests::broker", "migrates", &[Criu]),
    (
        "sempa-tests::broker",
        "fastdnaml",
        &[TestNeed::Source(FASTDNAML)],
    ),
    (
        "sempa-tests::installed_libraries",
        "",
        &[GCC, GXX, PKG_CONFIG],
    ),
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
    ("pvm3-capi::installed_library", "", &[VALGRIND]),
    ("pvm3-capi::waiting", "", &[Root, TestNeed::Processors(2)]),
    ("gpvm3", "", &[GCC]),
    ("sempa-qap", "", &[FullRun]),
    ("checkpoint", "", &[PYTHON]),
    ("checkpoint", "other_user_is_refused", &[Root]),
    ("checkpoint", "full_disk_leaves_nothing", &[Root]),
    ("checkpoint", "user_may_open_only_own_files", &[Root]),
    ("checkpoint::user_images", "", &[Root, Criu, GCC]),
    ("pvmd", "", &[]),
    ("pvmd", "disk", &[Disk]),
    ("pvmd::daemon", "", &[Root]),
    ("pvm-admin", "", &[Root]),
    ("pvm-admin", "engine", &[Criu]),
    ("pvm-tasker", "", &[Criu, GCC]),
    ("pvm-tasker::bin/pvm-tasker", "", &[PYTHON]),
    ("pvm-tasker::pauses", "freez", &[Freezer]),
    ("pvm-tasker::leases", "", &[PYTHON]),
    ("pvm-tasker::leftovers", "process_in_the_kernel", &[Freezer]),
    ("pvm-tasker::leftovers", "control_group", &[Freezer]),
    ("pvm-tasker::pauses", "control_groups", &[Freezer]),
    ("pvm-tasker::kinds", "python", &[PYTHON]),
    ("pvm-tasker::kinds", "asyncio", &[PYTHON]),
    ("pvm-tasker::kinds", "fortran", &[GFORTRAN]),
    ("pvm-tasker::kinds_of_users", "", &[Root]),
    // Those that depend on the rights of the user run always.
    ("pvm-tasker::kinds_of_users", "descriptors::", &[FullRun]),
    ("pvm-tasker::kinds_of_users", "signals::", &[FullRun]),
    ("pvm-tasker::kinds_of_users", "threads::", &[FullRun]),
    ("pvm-tasker::kinds_of_users", "refusals::a_", &[FullRun]),
    ("pvm-tasker::kinds_of_users", "refusals::an_", &[FullRun]),
    ("pvm-tasker::kinds_of_users", "python", &[PYTHON]),
    ("pvm-tasker::kinds_of_users", "asyncio", &[PYTHON]),
    ("pvm-tasker::kinds_of_users", "fortran", &[GFORTRAN]),
    ("pvm-tasker::ordinary_users", "", &[Root]),
    ("pvm-tasker::taskerd", "", &[Root]),
    ("pvm-tasker::image_attacks", "", &[Root]),
];

/// Returns the needs of an ignored test. A test whose binary is not in the table needs hosts.
fn test_needs(binary: &str, test: &str) -> Vec<TestNeed> {
    let package = binary.split("::").next().unwrap_or(binary);
    let rows = TEST_NEEDS.iter().filter(|(table_binary, name_part, _)| {
        (*table_binary == binary || *table_binary == package) && test.contains(name_part)
    });
    let needs: Vec<TestNeed> = rows
        .flat_map(|(_, _, needs)| needs.iter().copied())
        .collect();
    let has_binary = TEST_NEEDS
        .iter()
        .any(|(table_binary, _, _)| *table_binary == binary || *table_binary == package);
    if has_binary { needs } else { vec![Hosts] }
}

/// Reasons why the set-up could not provide a need; `None` for an available need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SetupFailures {
    pub(crate) criu: Option<String>,
    pub(crate) source_packages: Option<String>,
}

/// Returns the reason why a need is not met on this machine; `None` if the need is met.
/// `is_full_run` is true if tests run with `SEMPA_TEST_FULL`.
fn unmet_reason(need: TestNeed, failures: &SetupFailures, is_full_run: bool) -> Option<String> {
    match need {
        TestNeed::FreeMemory(default_mib, full_mib) => {
            let required_mib = if is_full_run { full_mib } else { default_mib };
            let free_mib = free_mebibytes();
            (free_mib < required_mib)
                .then(|| format!("{required_mib} MiB of free memory are needed, not {free_mib}"))
        }
        Root => (!requirements::is_root()).then(|| "this is not root".to_string()),
        Hosts => requirements::unmet_requirement(),
        Criu => failures.criu.clone(),
        TestNeed::Source(package) => {
            let missing = package.unmet_requirement()?;
            Some(failures.source_packages.clone().unwrap_or(missing))
        }
        TestNeed::Program(name, package) => {
            let is_installed = if name.starts_with('/') {
                Path::new(name).exists()
            } else {
                requirements::find_in_path(name).is_some()
            };
            (!is_installed).then(|| format!("{name} is missing: install {package}"))
        }
        Examples => pvm_examples::unmet_requirement(),
        Screen => screen::unmet_requirement(),
        Bus => logind::unmet_requirement(),
        ProcessorGroups => limits::unmet_cpu_requirement(),
        MemoryGroups => limits::unmet_memory_requirement(),
        Freezer => {
            let mounts = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
            sempa_proto::cgroup::find_mount_point(&mounts, None)
                .is_none()
                .then(|| "control groups of version 2 are not mounted".to_string())
        }
        Disk => requirements::missing_disk_reason(),
        FullRun => (!is_full_run).then(|| "SEMPA_TEST_FULL is not set".to_string()),
        TestNeed::Processors(required_count) => {
            let count = std::thread::available_parallelism().map_or(1, usize::from);
            (count < required_count).then(|| format!("{required_count} processors are needed"))
        }
    }
}

/// Returns the available memory in MiB; 0 if the amount is unknown.
fn free_mebibytes() -> u64 {
    let memory_info = Meminfo::current().ok();
    memory_info
        .and_then(|memory_info| memory_info.mem_available)
        .unwrap_or(0)
        >> 20
}

/// Decides which tests are skipped. Each need is checked only once.
pub(crate) struct SkipDecider {
    failures: SetupFailures,
    is_full_run: bool,
    unmet_reasons: BTreeMap<TestNeed, Option<String>>,
}

impl SkipDecider {
    /// Creates a decider that has not checked any need. `uses_full_sizes` is true if tests run with
    /// `SEMPA_TEST_FULL`.
    pub(crate) fn new(failures: SetupFailures, uses_full_sizes: bool) -> Self {
        Self {
            failures,
            is_full_run: uses_full_sizes,
            unmet_reasons: BTreeMap::new(),
        }
    }

    /// Returns the reason to skip an ignored test; `None` if the machine meets all needs of the
    /// test.
    pub(crate) fn skip_reason(&mut self, binary: &str, test: &str) -> Option<String> {
        test_needs(binary, test).into_iter().find_map(|need| {
            self.unmet_reasons
                .entry(need)
                .or_insert_with(|| unmet_reason(need, &self.failures, self.is_full_run))
                .clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The needs of a test are those of its package, those of its binary and those of its name.
    #[test]
    fn needs_of_package_binary_and_name_add_up() {
        assert_eq!(
            test_needs("sempa-tests::correct_results", "python_tasks"),
            [Hosts, Criu, PYTHON]
        );
        assert_eq!(test_needs("pvm-tasker::kinds", "x"), [Criu, GCC]);
        assert_eq!(test_needs("pvm-console::terminal", "x"), [Hosts; 0]);
    }

    #[test]
    fn represented_tests_belong_to_the_full_run() {
        let test = "refusals::a_device_is_refused";
        let reason = |is_full_run| {
            let mut skip_decider = SkipDecider::new(SetupFailures::default(), is_full_run);
            skip_decider.skip_reason("pvm-tasker::kinds_of_users", test)
        };
        assert!(reason(false).is_some());
        assert!(reason(true).is_none_or(|why| !why.contains("SEMPA_TEST_FULL")));
    }

    #[test]
    fn unknown_binary_needs_hosts() {
        assert_eq!(test_needs("pvm-other::it", "x"), [Hosts]);
    }

    /// The tests of migrations are skipped with the CRIU error that the set-up has returned. All
    /// other tests run.
    #[test]
    fn missing_criu_skips_only_migration_tests() {
        let failures = SetupFailures {
            criu: Some("no CRIU".into()),
            ..SetupFailures::default()
        };
        let mut skip_decider = SkipDecider::new(failures, false);
        let reason = |skip_decider: &mut SkipDecider, name| skip_decider.skip_reason(name, "x");
        assert_eq!(
            reason(&mut skip_decider, "pvm-tasker::migrations").as_deref(),
            Some("no CRIU")
        );
        assert_eq!(reason(&mut skip_decider, "libpvm::api"), None);
    }
}
