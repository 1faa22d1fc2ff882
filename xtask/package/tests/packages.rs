//! Packages of the programs that the test run has built.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Prints the version of the module, and whether its native part works.
const IMPORT: &str = "import sempa_pvm as pvm, importlib.metadata as metadata; \
     print(metadata.version('sempa-pvm'), pvm.Packer().pack_int(3) is not None)";

/// Makes packages in a folder.
fn make_packages(out: &Path) {
    let profile = xtask_install::build_profile().expect("a profile");
    let output = Command::new(env!("CARGO_BIN_EXE_xtask-package"))
        .args(["package", "--quick", "--as-built", &profile, "--out"])
        .arg(out)
        .output()
        .expect("the packager runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Returns the content of all files of a folder by name.
fn read_files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    std::fs::read_dir(folder)
        .expect("a folder")
        .flatten()
        .map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, std::fs::read(entry.path()).expect("a file"))
        })
        .collect()
}

fn dpkg_deb(arguments: &[&str], package: &Path) -> String {
    let output = Command::new("dpkg-deb")
        .args(arguments)
        .arg(package)
        .output()
        .expect("dpkg is installed");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Programs that are linked with a library depend on the package of the library.
fn check_library_packages(package: &dyn Fn(&str) -> PathBuf) {
    for (name, library) in [
        ("libsempa-work1", "libsempa_work"),
        ("libsempa-broker1", "libsempa_broker"),
    ] {
        let content = dpkg_deb(&["--contents"], &package(name));
        let link = format!("./usr/lib/x86_64-linux-gnu/{library}.so.1 -> {library}.so.1.");
        assert!(content.contains(&link), "{link}\nin\n{content}");
        let shlibs = dpkg_deb(&["--info"], &package(name));
        assert!(shlibs.contains("shlibs"), "{shlibs}");
    }
}

/// The system's Python imports the module from the package and from the wheel, whose checksums are
/// right.
fn check_python_module(package: &Path, out: &Path) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut unpack = Command::new("dpkg-deb");
    unpack.arg("--extract").arg(package).arg(folder.path());
    output_of(&mut unpack);
    let wheel = std::fs::read_dir(out)
        .expect("a folder")
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|ending| ending == "whl"))
        .expect("a wheel");
    let mut unpack = Command::new("/usr/bin/python3");
    unpack.args(["-m", "wheel", "unpack", "--dest"]);
    output_of(unpack.arg(folder.path()).arg(wheel));
    let version = env!("CARGO_PKG_VERSION");
    for place in [
        "usr/lib/python3/dist-packages".to_string(),
        format!("sempa_pvm-{version}"),
    ] {
        let mut python = Command::new("/usr/bin/python3");
        python
            .args(["-B", "-c", IMPORT])
            .current_dir("/")
            .env("PYTHONPATH", folder.path().join(place));
        assert_eq!(output_of(&mut python), format!("{version} True\n"));
    }
}

/// Runs a command that must succeed and returns its output.
fn output_of(command: &mut Command) -> String {
    let output = command.output().expect("the program is installed");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The same programs give the same packages. The packages replace Debian's by versioned relations,
/// and have Debian's dependency for programs that are linked with the libraries.
#[test]
#[ignore = "system tier: needs built programs, debhelper and patchelf"]
fn packages_are_reproducible_and_replace_debians() {
    let folder = tempfile::tempdir().expect("a folder");
    let outs = ["a", "b"].map(|name| folder.path().join(name));
    for out in &outs {
        make_packages(out);
    }
    let [files, other_files] = outs.each_ref().map(|out| read_files(out));
    assert!(files.len() >= 9, "{:?}", files.keys());
    for (name, bytes) in &files {
        assert!(other_files.get(name) == Some(bytes), "{name} differs");
    }
    let package = |name: &str| {
        let file = files.keys().find(|file| {
            file.split_once('_')
                .is_some_and(|(package, _)| package == name)
        });
        outs[0].join(file.unwrap_or_else(|| panic!("no package {name}")))
    };
    let library = package("sempa-libpvm3");
    let fields = dpkg_deb(&["--field"], &library);
    for field in [
        "Provides: libpvm3 (= 3.4.6+sempa",
        "Conflicts: libpvm3\n",
        "Replaces: libpvm3\n",
        "Breaks: pvm (<< 3.4.6+sempa)\n",
        "Multi-Arch: same\n",
    ] {
        assert!(fields.contains(field), "{field}\nin\n{fields}");
    }
    assert!(
        dpkg_deb(&["--info"], &library).contains("shlibs"),
        "programs find the package that has the libraries"
    );
    let content = dpkg_deb(&["--contents"], &package("sempa"));
    for path in [
        "./usr/bin/pvm\n",
        "./usr/bin/pvmgs\n",
        "./usr/bin/pvm-broker\n",
        "./usr/lib/pvm3/lib/pvmd -> ",
        "./usr/lib/pvm3/bin/LINUX64/\n",
        "./usr/share/bash-completion/completions/pvm\n",
        "./usr/share/man/man1/pvm.1.gz\n",
    ] {
        assert!(content.contains(path), "{path}\nin\n{content}");
    }
    check_library_packages(&package);
    check_python_module(&package("python3-sempa-pvm"), &outs[0]);
    let development = dpkg_deb(&["--contents"], &package("sempa-dev"));
    for path in [
        "./usr/include/pvm3.h\n",
        "./usr/include/sempa_work.h\n",
        "./usr/include/sempa-mw/MWDriver.h\n",
        "./usr/include/smbl.h\n",
        "./usr/lib/x86_64-linux-gnu/libsempa_work.so -> libsempa_work.so.1",
        "./usr/lib/x86_64-linux-gnu/libsempa_broker.a\n",
        "./usr/lib/x86_64-linux-gnu/pkgconfig/sempa_mw.pc\n",
        "./usr/lib/x86_64-linux-gnu/libpvm3.so -> libpvm3.so.3",
        "./usr/lib/x86_64-linux-gnu/pkgconfig/pvm3.pc\n",
        "./usr/share/man/man3/pvm_send.3.gz\n",
    ] {
        assert!(development.contains(path), "{path}\nin\n{development}");
    }
}
