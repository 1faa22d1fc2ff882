//! What users and administrators do with the packages.

use super::Plan;
use super::system::System;
use crate::process::{capture, run};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::Path;
use std::process::Command;
use xtask_install::{DebianPackage, project_folder};

/// A check in one release of Debian.
type Scenario = fn(&Plan<'_>, &str) -> Result<()>;

/// All checks with their names.
pub(super) const ALL: [(&str, Scenario); 3] = [
    (
        "Debian's programs on top, upgrade with a running virtual machine, purge",
        debian_programs_on_top,
    ),
    ("Debian's programs beneath", debian_programs_beneath),
    ("tar archive", tar_archive),
];

/// Debian's packages that need PVM.
const DEBIAN_PROGRAMS: [&str; 4] = ["tablix2", "pvm-examples", "netpipe-pvm", "slang-pvm"];
/// Debian's packages that ours replace.
const REPLACED_PACKAGES: [&str; 3] = ["pvm", "libpvm3", "pvm-dev"];
/// A program that uses groups, and its place in a system.
const RING_SOURCE: &str = "tests/pvm-programs/ring.c";
const RING: &str = "home/alice/pvm3/bin/LINUX64/ring";
/// Where packages have headers and libraries.
const DEBIAN_PLACES: CompilePlaces = CompilePlaces {
    include: "usr/include",
    libraries: "usr/lib/x86_64-linux-gnu",
};
/// A problem for tablix2.
const TIMETABLE: &str = include_str!("timetable.xml");

/// Fails with a message unless a condition holds.
fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<()> {
    if condition { Ok(()) } else { bail!(message()) }
}

fn ensure_contains(text: &str, part: &str) -> Result<()> {
    ensure(text.contains(part), || format!("no '{part}' in:\n{text}"))
}

/// Installs our packages, then Debian's programs, runs them, upgrades, and removes everything.
fn debian_programs_on_top(plan: &Plan<'_>, suite: &str) -> Result<()> {
    let system = System::start(suite, plan.cache, "on-top")?;
    let leftovers_before = own_paths(&system)?;
    system.offer_packages(plan.packages)?;
    let own_packages = own_packages(plan.packages);
    system.install(&own_packages.join(" "))?;
    system.install(&DEBIAN_PROGRAMS.join(" "))?;
    check_installed(&system, &own_packages)?;
    run_debian_programs(&system)?;
    compile_and_run(&system)?;
    check_new_libraries(&system)?;
    check_python(&system)?;
    check_criu(&system)?;
    upgrade_with_running_vm(plan, &system)?;
    remove_and_purge(&system, &own_packages, &leftovers_before)
}

/// Installs Debian's programs with Debian's PVM, then our packages, and runs the programs.
fn debian_programs_beneath(plan: &Plan<'_>, suite: &str) -> Result<()> {
    let system = System::start(suite, plan.cache, "beneath")?;
    system.install(&format!("{} pvm-dev", DEBIAN_PROGRAMS.join(" ")))?;
    for package in REPLACED_PACKAGES {
        let installed = system.installed_packages()?;
        ensure(installed.iter().any(|name| name == package), || {
            format!("Debian's {package} is not installed at the start")
        })?;
    }
    system.offer_packages(plan.packages)?;
    // This program contains PVM's own group library, whose server our packages replace.
    compile(
        &system,
        &DEBIAN_PLACES,
        RING_SOURCE,
        RING,
        Some("libgpvm3.a"),
    )?;
    let own_packages = own_packages(plan.packages);
    system.install(&own_packages.join(" "))?;
    check_installed(&system, &own_packages)?;
    run_debian_programs(&system)?;
    let output =
        system.run_as_user("pvm start && pvm3/bin/LINUX64/ring 3 && pvm ps -a; pvm halt")?;
    ensure_contains(&output, "3 members: 3")?;
    ensure_contains(&output, "pvmgs")?;
    // An administrator goes back to Debian's PVM by its name.
    system.install("pvm libpvm3")?;
    let installed = system.installed_packages()?;
    ensure(
        installed.iter().any(|name| name == "pvm") && !installed.iter().any(|name| name == "sempa"),
        || format!("Debian's PVM did not take our place: {installed:?}"),
    )?;
    for package in DEBIAN_PROGRAMS {
        ensure(installed.iter().any(|name| name == package), || {
            format!("{package} was removed with our packages")
        })?;
    }
    Ok(())
}

/// Installs the tar archive, runs programs, installs it again, and removes it.
fn tar_archive(plan: &Plan<'_>, suite: &str) -> Result<()> {
    let system = System::start(suite, plan.cache, "tar")?;
    let archive = fs::read_dir(plan.packages)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.to_string_lossy().ends_with(".tar.xz"))
        .context("no tar archive")?;
    run(Command::new("tar")
        .args(["--extract", "--file"])
        .arg(&archive)
        .arg("--directory")
        .arg(system.path("srv")))?;
    let script = "/srv/sempa-*/install.sh";
    ensure_contains(&system.run(script)?, "installed in /opt/sempa")?;
    fs::create_dir_all(system.path("opt/sempa/bin/LINUX64"))?;
    let places = CompilePlaces {
        include: "opt/sempa/include",
        libraries: "opt/sempa/lib",
    };
    compile(
        &system,
        &places,
        RING_SOURCE,
        "opt/sempa/bin/LINUX64/ring",
        Some("libgpvm3.so"),
    )?;
    let environment = "export PATH=/opt/sempa/bin:$PATH LD_LIBRARY_PATH=/opt/sempa/lib;";
    system.run_as_user(&format!("{environment} pvm start"))?;
    // An upgrade replaces the files of a running virtual machine.
    system.run(script)?;
    let output = system.run_as_user(&format!("{environment} /opt/sempa/bin/LINUX64/ring 3"))?;
    ensure_contains(&output, "3 members: 3")?;
    system.run_as_user(&format!("{environment} pvm halt"))?;
    fs::remove_file(system.path("opt/sempa/bin/LINUX64/ring"))?;
    system.run(&format!("{script} --uninstall"))?;
    ensure(!system.path("opt/sempa").exists(), || {
        "files remain in /opt/sempa".to_string()
    })
}

/// Returns the names of our packages that were made.
fn own_packages(folder: &Path) -> Vec<&'static str> {
    let is_made = |package: &DebianPackage| {
        super::deb_files(folder).is_ok_and(|files| {
            files.iter().any(|file| {
                let name = file.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with(&format!("{}_", package.name()))
            })
        })
    };
    DebianPackage::ALL
        .into_iter()
        .filter(is_made)
        .map(DebianPackage::name)
        .collect()
}

/// All our packages and Debian's programs are installed, and nothing that ours replace.
fn check_installed(system: &System, own_packages: &[&str]) -> Result<()> {
    let installed = system.installed_packages()?;
    for package in own_packages.iter().chain(&DEBIAN_PROGRAMS) {
        ensure(installed.iter().any(|name| name == package), || {
            format!("{package} is not installed")
        })?;
    }
    for package in REPLACED_PACKAGES {
        ensure(!installed.iter().any(|name| name == package), || {
            format!("{package} is still installed")
        })?;
    }
    Ok(())
}

/// Runs a session of the console and programs of Debian as the ordinary user.
fn run_debian_programs(system: &System) -> Result<()> {
    fs::write(system.path("home/alice/timetable.xml"), TIMETABLE)?;
    let session = "pvm start && pvm conf && hello.pvm && echo '10 4' | gexample && pvm halt";
    let output = system.run_as_user(session)?;
    ensure_contains(&output, "LINUX64")?;
    ensure_contains(&output, "hello, world")?;
    ensure_contains(&output, "The product of column 1 is 3.6288e+06")?;
    let timetable = "pvm start && tablix2 -n 2 -o out_ timetable.xml && ls -l out_* && pvm halt";
    ensure_contains(&system.run_as_user(timetable)?, "out_result0.xml")?;
    for program in ["/usr/bin/tablix2", "/usr/bin/NPpvm", "/usr/bin/hello.pvm"] {
        let libraries = system.run(&format!("ldd {program}"))?;
        ensure(!libraries.contains("not found"), || libraries.clone())?;
    }
    let environment = system.run_as_user("pvm start && pvm spawn '->' /usr/bin/env; pvm halt")?;
    ensure(!environment.contains("LD_LIBRARY_PATH"), || {
        format!("tasks get LD_LIBRARY_PATH:\n{environment}")
    })
}

/// Folders of a system with PVM's headers and libraries, relative to its root.
struct CompilePlaces {
    include: &'static str,
    libraries: &'static str,
}

/// Compiles a program of the sources on this machine, with the headers and libraries of PVM of a
/// system. `group_library` is the file name of the group library, if the program needs one.
fn compile(
    system: &System,
    places: &CompilePlaces,
    source: &str,
    target: &str,
    group_library: Option<&str>,
) -> Result<()> {
    // Other headers, and the C library, are those of this machine.
    let headers = tempfile::tempdir()?;
    for name in ["pvm3.h", "pvmproto.h", "pvmtev.h"] {
        let header = system.path(places.include).join(name);
        fs::copy(&header, headers.path().join(name))
            .with_context(|| header.display().to_string())?;
    }
    let libraries = system.path(places.libraries);
    let target_path = system.path(target);
    fs::create_dir_all(target_path.parent().unwrap_or(Path::new("/")))?;
    capture(
        Command::new("gcc")
            .args(["-O1", "-I"])
            .arg(headers.path())
            .arg(project_folder().join(source))
            .arg("-o")
            .arg(&target_path)
            .arg("-Wl,--allow-shlib-undefined")
            .args(group_library.map(|name| libraries.join(name)))
            .arg(libraries.join("libpvm3.so")),
    )?;
    Ok(())
}

/// A program that is compiled with the development package runs, and pkg-config finds the files.
fn compile_and_run(system: &System) -> Result<()> {
    compile(
        system,
        &DEBIAN_PLACES,
        RING_SOURCE,
        RING,
        Some("libgpvm3.so"),
    )?;
    let output = system.run_as_user("pvm start && pvm3/bin/LINUX64/ring 3; pvm halt")?;
    ensure_contains(&output, "3 members: 3")?;
    for name in ["pvm3", "gpvm3", "sempa_work", "sempa_broker"] {
        let path = format!("usr/lib/x86_64-linux-gnu/pkgconfig/{name}.pc");
        let text = fs::read_to_string(system.path(&path))?;
        ensure_contains(&text, "prefix=/usr\n")?;
        ensure_contains(&text, "libdir=${prefix}/lib/x86_64-linux-gnu\n")?;
    }
    Ok(())
}

/// Programs in C++ and C that are compiled with the development package run as masters, workers and
/// members of a session, with the libraries of the packages.
fn check_new_libraries(system: &System) -> Result<()> {
    let include = system.path(DEBIAN_PLACES.include);
    let libraries = system.path(DEBIAN_PLACES.libraries);
    // Other headers, and the C library, are those of this machine.
    let headers = tempfile::tempdir()?;
    for name in ["sempa_work.h", "smbl.h"] {
        fs::copy(include.join(name), headers.path().join(name))
            .with_context(|| format!("{name} in {}", include.display()))?;
    }
    for (source, program, library) in [
        ("examples/cpp/monte_carlo.cpp", "pi", "libsempa_work.so"),
        (
            "broker/examples/squares_foreman.c",
            "foreman",
            "libsempa_broker.so",
        ),
        (
            "broker/examples/squares_worker.c",
            "worker",
            "libsempa_broker.so",
        ),
    ] {
        let compiler = if source.ends_with(".cpp") {
            "g++"
        } else {
            "gcc"
        };
        capture(
            Command::new(compiler)
                .args(["-O1", "-static-libstdc++", "-static-libgcc", "-I"])
                .arg(headers.path())
                .arg("-I")
                .arg(include.join("sempa-mw"))
                .arg(project_folder().join(source))
                .arg("-o")
                .arg(system.path("home/alice").join(program))
                .arg("-Wl,--allow-shlib-undefined")
                .arg(libraries.join(library)),
        )?;
    }
    let output = system.run_as_user("pvm start && ./pi 10; pvm halt")?;
    ensure_contains(&output, "pi is about 3.14080")?;
    let session = "pvm start && (./worker squares & ./foreman squares 100; wait); pvm halt";
    ensure_contains(
        &system.run_as_user(session)?,
        "the sum of 100 squares is 328350",
    )
}

/// The packaged Python module makes tasks of the system's Python.
fn check_python(system: &System) -> Result<()> {
    let program = "home/alice/sums.py";
    fs::copy(
        project_folder().join("python/examples/sums.py"),
        system.path(program),
    )?;
    let output = system.run_as_user("pvm start && python3 sums.py 1000; pvm halt")?;
    ensure_contains(&output, "the sum of 1000 squares is 332833500")
}

/// The packaged CRIU starts, with its own libraries.
fn check_criu(system: &System) -> Result<()> {
    if !system.path("usr/lib/sempa/criu").exists() {
        return Ok(());
    }
    let version = system.run("/usr/lib/sempa/criu/sbin/criu --version")?;
    ensure_contains(&version, "Version: ")
}

/// Upgrades while a task runs. The task answers before and after with the same tid, and a program
/// that is started afterwards talks to it.
fn upgrade_with_running_vm(plan: &Plan<'_>, system: &System) -> Result<()> {
    compile(
        system,
        &DEBIAN_PLACES,
        "tests/programs/hold.c",
        "home/alice/pvm3/bin/LINUX64/hold",
        None,
    )?;
    system.run_as_user("pvm start")?;
    let spawned = system.run_as_user("pvm spawn hold 4")?;
    let tid = spawned
        .split_whitespace()
        .find(|word| word.starts_with('t') && word[1..].chars().all(|c| c.is_ascii_hexdigit()))
        .with_context(|| format!("no tid in: {spawned}"))?
        .to_string();
    let ask = format!("pvm3/bin/LINUX64/hold ask {tid}");
    ensure_contains(&system.run_as_user(&ask)?, "sum GOOD")?;
    system.offer_packages(plan.next_packages)?;
    system.run("apt-get -qq --yes upgrade")?;
    let version = system.run("dpkg-query -W -f '${Version}' sempa")?;
    ensure(version == plan.next_version, || {
        format!("the installed version is {version}")
    })?;
    ensure_contains(
        &system.run_as_user("pvm ps -a")?,
        tid.trim_start_matches('t'),
    )?;
    ensure_contains(&system.run_as_user(&ask)?, "sum GOOD")?;
    ensure_contains(&system.run_as_user("hello.pvm")?, "hello, world")?;
    system.run_as_user("pvm halt")?;
    Ok(())
}

/// Removes the packages, then purges them. Nothing of ours remains.
fn remove_and_purge(
    system: &System,
    own_packages: &[&str],
    leftovers_before: &[String],
) -> Result<()> {
    let debian_programs = DEBIAN_PROGRAMS.join(" ");
    system.run(&format!("apt-get -qq --yes remove {debian_programs}"))?;
    let own_packages = own_packages.join(" ");
    system.run(&format!("apt-get -qq --yes remove {own_packages}"))?;
    ensure(system.path("etc/sempa/owner.toml").exists(), || {
        "a removal took the administrator's rules".to_string()
    })?;
    system.run(&format!(
        "apt-get -qq --yes purge {own_packages} {debian_programs} && apt-get -qq --yes autoremove --purge"
    ))?;
    let leftovers: Vec<String> = own_paths(system)?
        .into_iter()
        .filter(|path| !leftovers_before.contains(path))
        .collect();
    ensure(leftovers.is_empty(), || {
        format!("these files remain after a purge: {leftovers:?}")
    })
}

/// Returns all paths of a system whose names are ours, without those of apt, of logs, and of the
/// user's home.
fn own_paths(system: &System) -> Result<Vec<String>> {
    let text = system.run(
        "find / -xdev \\( -path /proc -o -path /sys -o -path /dev -o -path /srv/sempa -o -path /home \
         -o -path /var/lib/apt -o -path /var/cache/apt -o -path /var/log -o -path /etc/apt \\) -prune -o \
         \\( -iname '*sempa*' -o -iname '*pvm*' -o -iname '*criu*' \\) -print; find /run -iname '*sempa*'",
    )?;
    Ok(text.lines().map(str::to_string).collect())
}
