//! Tests of the library's symbols and of its headers.

mod common;

use common::{built_library, c_compiler, include_dir, require_file, run_compiler, source_path};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names of the documented functions, without those of the group library.
const FUNCTION_NAMES: &str = "
    pvm_addhosts pvm_delhosts pvm_addmhf pvm_delmhf pvm_archcode pvm_bufinfo pvm_catchout pvm_config pvm_exit pvm_halt
    pvm_getcontext pvm_newcontext pvm_getrbuf pvm_getsbuf pvm_mytid pvm_parent pvm_reg_hoster pvm_reg_tasker
    pvm_upkmesg pvm_export pvm_unexport pvm_freebuf pvm_freecontext pvm_setcontext pvm_getopt pvm_initsend pvm_kill
    pvm_mkbuf pvm_pstat pvm_setrbuf pvm_setsbuf pvm_tidtohost pvm_pkmesg pvm_pkmesgbody pvm_getfds pvm_getmboxinfo
    pvm_getminfo pvm_setminfo pvm_getnoresets pvm_gettmask pvm_settmask pvm_hostsync pvm_insert pvm_lookup pvm_delete
    pvm_putinfo pvm_recvinfo pvm_delinfo pvm_mcast pvm_mstat pvm_notify pvm_nrecv pvm_recv pvm_probe pvm_send
    pvm_sendsig pvm_setopt pvm_packf pvm_unpackf pvm_perror pvm_pkbyte pvm_pkcplx pvm_pkdcplx pvm_pkdouble pvm_pkfloat
    pvm_pkint pvm_pkuint pvm_pklong pvm_pkulong pvm_pkshort pvm_pkushort pvm_upkbyte pvm_upkcplx pvm_upkdcplx
    pvm_upkdouble pvm_upkfloat pvm_upkint pvm_upkuint pvm_upklong pvm_upkulong pvm_upkshort pvm_upkushort pvm_pkstr
    pvm_upkstr pvm_precv pvm_psend pvm_recvf pvm_reg_rm pvm_reg_tracer pvm_siblings pvm_spawn pvm_start_pvmd
    pvm_strerror pvm_version pvm_tasks pvm_tickle pvm_trecv pvmgetrsh pvmgettmp pvmtmpnam

    lpvmerr pvmbeatask pvmendtask pvmputenv pvmreset pvmstrtoi pvmgetclock pvmsleep pvmdisplaymhfinfo pvmnametag i_dump
    pvmlogerror pvmlogperror pvmlogprintf pvmsettaskname pvmchkuid pvmbailout tev_begin tev_fin tev_init tev_flush
    tev_do_trace pvm_vpackf pvm_vunpackf pvmupkstralloc pvmxtoi pvmmatchstring pvmgetdsig pvmgetroot";

/// Names and sizes in bytes of the variables.
const VARIABLE_NAMES_AND_SIZES: &str = "
    pvm_errlist 296 pvm_nerr 4 pvm_errno 4 pvmmytid 4 pvmmyptid 4 pvmmyupid 4 pvm_useruid 4 pvmautoerr 4
    pvmshowtaskid 4 pvmtoplvl 4 pvmnsibs 4 pvmnoresetindex 4 pvmrouteopt 4 pvmfrgsiz 4 pvmudpmtu 4 pvmmyctx 4
    pvmmydsig 4 pvmschedtid 4 pvmrescode 4 pvmdebmask 4 pvmnoreset 4 pvmctrc 68 pvmtrc 68 pvmsibtids 8 pvmmytaskname 8
    pvmrxlist 8 pvmrbuf 8 pvmsbuf 8 waitlist 8 pvmmboxclasses 8 pvm_inprecv 8 pvmmidh 8 pvmmidhsiz 4 pvmtevinfo 6104
    pvmtevdidlist 1968 pvmtrccodef 8 pvmtrcmp 8 pvmtrcztv 16 pvmtrcdesc 4 pvmtrctmp 4 pvmtrcsavekind 4 pvmtrcsbf 4
    pvmtrcsbfsave 4";

fn run_program(program: &str, args: &[&str], path: &Path) -> String {
    let output = Command::new(program)
        .args(args)
        .arg(path)
        .output()
        .expect("binutils come with the C compiler");
    assert!(
        output.status.success(),
        "{program}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the kind (the letter that `nm` prints) and the size in bytes of each exported name.
fn exported_symbols(path: &Path) -> BTreeMap<String, (char, u64)> {
    let mut symbols = BTreeMap::new();
    for line in run_program("nm", &["-D", "-S", "--defined-only"], path).lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if let [_, size, kind, name] = fields[..] {
            let kind = kind.chars().next().expect("a letter");
            symbols.insert(
                name.to_string(),
                (kind, u64::from_str_radix(size, 16).expect("a number")),
            );
        }
    }
    symbols
}

/// Functions are exported as code, variables as data with their size.
#[test]
#[ignore = "system tier: needs gcc"]
fn every_name_is_exported_with_its_size() {
    let names = exported_symbols(&built_library());
    for name in FUNCTION_NAMES.split_whitespace() {
        assert!(
            names.get(name).is_some_and(|(kind, _)| *kind == 'T'),
            "{name}"
        );
    }
    let names_and_sizes: Vec<&str> = VARIABLE_NAMES_AND_SIZES.split_whitespace().collect();
    for pair in names_and_sizes.chunks(2) {
        let (kind, size) = names
            .get(pair[0])
            .unwrap_or_else(|| panic!("{} is missing", pair[0]));
        assert!(matches!(kind, 'D' | 'B' | 'R'), "{} is {kind}", pair[0]);
        assert_eq!(size.to_string(), pair[1], "size of {}", pair[0]);
    }
}

const DEBIAN_LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libpvm3.so.3";

/// Differences from Debian's library: one name and its reason in each line.
const ALLOWED_DIFFERENCES: &str = include_str!("exports.txt");

/// All names and sizes equal the names and sizes in Debian's library, except for the listed
/// differences.
#[test]
#[ignore = "system tier: needs gcc and Debian's PVM"]
fn names_and_sizes_are_debians_but_for_a_list() {
    require_file(DEBIAN_LIBRARY, "pvm");
    let (own_symbols, debian_symbols) = (
        exported_symbols(&built_library()),
        exported_symbols(Path::new(DEBIAN_LIBRARY)),
    );
    assert!(debian_symbols.len() > 250, "{} names", debian_symbols.len());
    let is_function = |kind: char| matches!(kind, 'T' | 'W');
    let is_equal = |name: &str| match (own_symbols.get(name), debian_symbols.get(name)) {
        (Some((a, _)), Some((b, _))) if is_function(*a) && is_function(*b) => true,
        (Some((a, own_size)), Some((b, size))) => {
            !is_function(*a) && !is_function(*b) && own_size == size
        }
        _ => false,
    };
    let names: BTreeSet<&str> = own_symbols
        .keys()
        .chain(debian_symbols.keys())
        .map(String::as_str)
        .collect();
    let differing_names: BTreeSet<&str> =
        names.into_iter().filter(|name| !is_equal(name)).collect();
    let lines = ALLOWED_DIFFERENCES
        .lines()
        .filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let listed_names: BTreeSet<&str> = lines
        .map(|line| {
            let (name, reason) = line
                .split_once(": ")
                .unwrap_or_else(|| panic!("no reason: {line}"));
            assert!(!reason.trim().is_empty(), "no reason: {line}");
            name
        })
        .collect();
    assert_eq!(
        differing_names
            .difference(&listed_names)
            .collect::<Vec<_>>(),
        Vec::<&&str>::new(),
        "differ and are not listed"
    );
    assert_eq!(
        listed_names
            .difference(&differing_names)
            .collect::<Vec<_>>(),
        Vec::<&&str>::new(),
        "are listed and do not differ"
    );
}

/// The library has PVM's soname and needs only the C library.
#[test]
#[ignore = "system tier: needs gcc"]
fn library_needs_only_the_c_library() {
    let dynamic_section = run_program("readelf", &["-d", "-W"], &built_library());
    assert!(
        dynamic_section.contains("Library soname: [libpvm3.so.3]"),
        "{dynamic_section}"
    );
    let needed_libraries: BTreeSet<&str> = dynamic_section
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| {
            line.split_once('[')?
                .1
                .split_once(']')
                .map(|(name, _)| name)
        })
        .collect();
    let allowed_libraries = BTreeSet::from([
        "libc.so.6",
        "libgcc_s.so.1",
        "libm.so.6",
        "ld-linux-x86-64.so.2",
    ]);
    assert!(
        needed_libraries.is_subset(&allowed_libraries),
        "{needed_libraries:?}"
    );
    assert!(
        !run_program("readelf", &["-V", "-W"], &built_library()).contains("Version definition"),
        "names carry no version"
    );
}

/// Returns Debian's programs that link with PVM's library.
fn debian_programs() -> Vec<PathBuf> {
    let mut programs: Vec<PathBuf> = [
        "tablix2",
        "tablix2_kernel",
        "pvm",
        "pvmgs",
        "pvm_gstat",
        "pvmgroups",
        "tracer",
    ]
    .iter()
    .chain(&["trcsort", "NPpvm"])
    .map(|name| Path::new("/usr/bin").join(name))
    .collect();
    programs.push("/usr/lib/pvm3/bin/LINUX64/tablix2_kernel".into());
    if let Ok(package_files) = Command::new("dpkg").args(["-L", "pvm-examples"]).output() {
        let package_files = String::from_utf8_lossy(&package_files.stdout).into_owned();
        programs.extend(
            package_files
                .lines()
                .filter(|path| path.starts_with("/usr/bin/"))
                .map(PathBuf::from),
        );
    }
    programs.retain(|path| path.is_file());
    programs
}

fn is_pvm_symbol(name: &str) -> bool {
    const UNPREFIXED_NAMES: [&str; 4] = ["lpvmerr", "i_dump", "waitlist", "errnamecode"];
    name.starts_with("pvm") || name.starts_with("tev_") || UNPREFIXED_NAMES.contains(&name)
}

#[test]
#[ignore = "system tier: needs gcc and Debian's PVM"]
fn debians_programs_find_every_import() {
    let mut exported_names: BTreeSet<String> =
        exported_symbols(&built_library()).into_keys().collect();
    // The group library exports the following names.
    exported_names.extend(
        "pvm_barrier pvm_bcast pvm_freezegroup pvm_getinst pvm_gettid pvm_gsize pvm_joingroup pvm_lvgroup pvm_gather
        pvm_scatter pvm_reduce pvmgs_tmout pvm_gsdump pvm_grphostinfo pvm_grpvhostinfo"
            .split_whitespace()
            .map(String::from),
    );
    let programs = debian_programs();
    assert!(
        !programs.is_empty(),
        "cannot run here: no program of Debian's PVM is installed"
    );
    for program in programs {
        for line in run_program("nm", &["-D", "--undefined-only"], &program).lines() {
            let name = line.split_whitespace().last().unwrap_or_default();
            let name = name.split('@').next().unwrap_or_default();
            assert!(
                !is_pvm_symbol(name) || exported_names.contains(name),
                "{} needs {name}",
                program.display()
            );
        }
    }
}

/// Compiles and runs a program that includes headers but needs no library. Returns the program's
/// output.
fn run_source_file(source: &Path, options: &[&OsStr]) -> String {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("program");
    run_compiler(
        c_compiler()
            .args(options)
            .arg(source)
            .arg("-o")
            .arg(&program),
    );
    String::from_utf8_lossy(&Command::new(program).output().expect("runs").stdout).into_owned()
}

/// Does the same as [`run_source_file`] for the source text of a program and the headers of a
/// directory.
fn run_source_text(text: &str, include_dir: &Path, warnings: &str) -> String {
    let dir = tempfile::tempdir().expect("a directory");
    let source = dir.path().join("text.c");
    std::fs::write(&source, text).expect("writable");
    run_source_file(
        &source,
        &[
            warnings.as_ref(),
            "-Werror".as_ref(),
            "-I".as_ref(),
            include_dir.as_os_str(),
        ],
    )
}

/// Returns the numbers and structure layouts that a header defines, as text.
fn numbers_and_layouts(header: &Path) -> String {
    run_source_file(
        &source_path("facts"),
        &[
            "-Wall".as_ref(),
            "-Werror".as_ref(),
            "-include".as_ref(),
            header.as_os_str(),
        ],
    )
}

/// The header has the same numbers and layouts as Debian's header.
#[test]
#[ignore = "system tier: needs gcc and Debian's PVM"]
fn header_has_debians_numbers_and_layouts() {
    let own_facts = numbers_and_layouts(&include_dir().join("pvm3.h"));
    assert!(own_facts.lines().count() > 100, "{own_facts}");
    let debian_header = Path::new("/usr/include/pvm3.h");
    require_file("/usr/include/pvm3.h", "pvm-dev");
    assert_eq!(own_facts, numbers_and_layouts(debian_header));
}

#[test]
#[ignore = "system tier: needs gcc"]
fn the_header_can_be_used_from_c_and_from_cpp() {
    for language in ["c", "c++"] {
        let output = c_compiler()
            .args([
                "-Wall",
                "-Wextra",
                "-Werror",
                "-fsyntax-only",
                "-x",
                language,
                "-include",
            ])
            .arg(include_dir().join("pvm3.h"))
            .arg("/dev/null")
            .output()
            .expect("a C compiler");
        let stderr_text = String::from_utf8_lossy(&output.stderr).into_owned();
        // On a machine without a C++ compiler, `cc` reports that `cc1plus` is missing.
        assert!(
            output.status.success() || stderr_text.contains("cc1plus"),
            "{language}: {stderr_text}"
        );
    }
}

/// Returns the names of the macros with a value that a header defines in addition to the macros of
/// `pvm3.h`.
fn macro_names(include_dir: &Path, header: &str) -> BTreeSet<String> {
    let defined_names = |headers: &[&str]| -> BTreeSet<String> {
        let mut command = c_compiler();
        command
            .args(["-x", "c", "-dM", "-E", "-I"])
            .arg(include_dir);
        for header in headers {
            command.args(["-include", header]);
        }
        let text = run_compiler(command.arg("/dev/null"));
        let definitions = text
            .lines()
            .filter_map(|line| line.strip_prefix("#define ")?.split_once(' '));
        // Macros with arguments have no value; names with a leading underscore are internal.
        definitions
            .filter(|(name, _)| !name.contains('(') && !name.starts_with('_'))
            .map(|(name, _)| name.into())
            .collect()
    };
    defined_names(&["pvm3.h", header])
        .difference(&defined_names(&["pvm3.h"]))
        .cloned()
        .collect()
}

/// Returns the values of the macros `names`, as a program that includes the header prints them.
fn macro_values(include_dir: &Path, header: &str, names: &BTreeSet<String>) -> String {
    let lines: Vec<String> = names
        .iter()
        .map(|n| format!("printf(\"{n} %ld\\n\", (long)({n}));"))
        .collect();
    let text = format!(
        "#include <pvm3.h>\n#include <{header}>\nint main(void) {{ {} return 0; }}\n",
        lines.join("\n")
    );
    run_source_text(&text, include_dir, "-w")
}

/// The headers for traces and messages have the same numbers as Debian's headers.
#[test]
#[ignore = "system tier: needs gcc and Debian's PVM"]
fn trace_headers_have_debians_numbers() {
    let debian_dir = Path::new("/usr/include");
    // Names that only PVM's daemons use: timers, states, frames, files.
    let is_internal = |name: &str| {
        let prefixes = [
            "DDMIN",
            "DDMAX",
            "DDERR",
            "DDPING",
            "DDBAIL",
            "DDFRAG",
            "DM_SLCONF_",
            "FF",
            "PVMD",
            "TDFRAG",
            "TDSOCK",
        ];
        prefixes.iter().any(|prefix| name.starts_with(prefix)) || name == "MAXHDR"
    };
    for header in ["pvmtev.h", "pvmproto.h"] {
        let own_names = macro_names(&include_dir(), header);
        assert!(own_names.len() > 90, "{own_names:?}");
        let own_values = macro_values(&include_dir(), header, &own_names);
        assert_eq!(own_values.lines().count(), own_names.len());
        require_file(&debian_dir.join(header).to_string_lossy(), "pvm-dev");
        let debian_names: BTreeSet<String> = macro_names(debian_dir, header)
            .into_iter()
            .filter(|name| !is_internal(name))
            .collect();
        assert_eq!(
            own_names
                .symmetric_difference(&debian_names)
                .collect::<Vec<_>>(),
            Vec::<&String>::new(),
            "{header}"
        );
        assert_eq!(
            own_values,
            macro_values(debian_dir, header, &own_names),
            "{header}"
        );
    }
}

#[test]
#[ignore = "system tier: needs gcc and Debian's PVM"]
fn the_structures_of_traces_have_debians_layout() {
    let program = "#include <stddef.h>\n#include <stdio.h>\n#include <pvm3.h>\n#include <pvmtev.h>\nint main(void) { Pvmtmask m; \
         TEV_MASK_INIT(m) TEV_MASK_SET(m, 5); TEV_MASK_UNSET(m, 5); TEV_MASK_SET(m, 6); printf(\"%s %d %zu %zu %zu %zu\\n\", m, \
         !!TEV_MASK_CHECK(m, 6), sizeof(struct Pvmtracer), offsetof(struct Pvmtracer, tmask), sizeof(struct Pvmtevinfo), \
         sizeof(struct Pvmtevdid)); return 0; }\n";
    assert_eq!(
        run_source_text(program, &include_dir(), "-Wall"),
        format!("@D{} 1 68 32 56 16\n", "@".repeat(33))
    );
}
