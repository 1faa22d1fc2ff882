#!/bin/bash
# Puts a CRIU that works on current kernels under a private prefix, beside the distribution's own.
#
#   install-criu.sh [--prefix DIR] [--least VERSION] [--from any|packages|source]
#
# packages: a newer suite's binary packages, with all their libraries, unpacked under DIR; patchelf makes the program
#           start with these libraries, which therefore never touch the rest of the machine.
# source:   the same suite's upstream tarball, compiled here.
# any:      packages, and source where they do not run.
#
# The archive is the one that apt of this machine knows; its signed index vouches for every file. Nothing of apt's own
# configuration or lists changes. A second run finds the program and ends at once.
# Exit status: 0 it works, 1 it could not be had, 3 it is there but `criu check` says that this kernel does not suit it.
set -euo pipefail

prefix=/opt/sempa/criu
least=4.1
from=any
suites=(sid testing trixie)

tell() { echo "install-criu: $*" >&2; }
fail() { tell "$*"; exit 1; }

while (($#)); do
    case $1 in
        --prefix) prefix=${2:?--prefix needs a folder}; shift 2 ;;
        --least)  least=${2:?--least needs a version}; shift 2 ;;
        --from)   from=${2:?--from needs any, packages or source}; shift 2 ;;
        *)        fail "unknown argument $1 (known: --prefix DIR, --least VERSION, --from any|packages|source)" ;;
    esac
done
[[ $prefix == /* ]] || fail "the prefix must be an absolute path, because it is written into the program"
[[ $from =~ ^(any|packages|source)$ ]] || fail "--from knows any, packages and source"
program=$prefix/sbin/criu

version_here() { "$program" --version 2>/dev/null | awk '$1 == "Version:" { print $2; exit }'; }
new_enough() {
    local found
    found=$(version_here) || return 1
    [[ -n $found ]] && dpkg --compare-versions "$found" ge "$least"
}
conclude() {
    local words
    if ((EUID == 0)) && ! words=$("$program" check 2>&1); then
        tell "$program $(version_here) is $1, but 'criu check' says: $(tail -n 2 <<<"$words" | tr '\n' ' ')"
        exit 3
    fi
    tell "$program $(version_here) is $1"
    exit 0
}

new_enough && conclude "there already"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
umask 022

# Prints "address keyring" of the first archive in apt's configuration that is not the security one.
known_archive() {
    local file
    for file in /etc/apt/sources.list.d/*.sources; do
        [[ -e $file ]] && awk -v RS= '{
            address = key = suite = ""
            count = split($0, line, "\n")
            for (i = 1; i <= count; i++) {
                split(line[i], word, " ")
                name = tolower(word[1])
                if (name == "uris:") address = word[2]
                if (name == "suites:") suite = word[2]
                if (name == "signed-by:") key = word[2]
            }
            if (address != "" && suite !~ /security/) print address, key
        }' "$file"
    done
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [[ -e $file ]] && sed -nE 's/^deb +(\[[^]]*\] +)?([^ ]+) +([^ ]+) .*/\2 \3 \1/p' "$file" |
            awk '$2 !~ /security/ { key = ""; if (match($0, /signed-by=[^] ]+/)) key = substr($0, RSTART + 10, RLENGTH - 10); print $1, key }'
    done
    return 0
}
read -r address keyring <<<"$(known_archive | head -n 1)" || true
[[ -n ${address:-} ]] || fail "apt's configuration names no archive; put a criu of version $least or later at $program yourself"
[[ -n ${keyring:-} && -e $keyring ]] || keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# An apt that knows one suite only, with lists and cache in the scratch folder.
apt_of=()
look_into() {
    local suite=$1 base=$scratch/$1 log=$scratch/$1/log
    mkdir -p "$base"/{sources,lists/partial,cache/archives/partial}
    chmod -R a+rX "$scratch"
    : >"$base/status"
    printf '%s\n' "Types: deb deb-src" "URIs: $address" "Suites: $suite" "Components: main" "Signed-By: $keyring" \
        >"$base/sources/one.sources"
    apt_of=(-o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$base/sources" -o Dir::State::Lists="$base/lists"
        -o Dir::State::Status="$base/status" -o Dir::Cache="$base/cache" -o Acquire::Languages=none
        -o Acquire::Retries=3 -o APT::Sandbox::User=root)
    [[ -e $base/read ]] && return 0
    if ! apt-get -qq "${apt_of[@]}" update >"$log" 2>&1; then
        # A mirror that lags serves an index that is signed but past its date; the signature is what counts here.
        grep -qi 'expired\|not valid yet' "$log" || { tell "suite $suite: no index at $address"; return 1; }
        tell "suite $suite: the index is past its date; its signature is good, so it is used"
        apt_of+=(-o Acquire::Check-Valid-Until=false -o Acquire::Check-Date=false)
        apt-get -qq "${apt_of[@]}" update >"$log" 2>&1 || { tell "suite $suite: no index at $address"; return 1; }
    fi
    touch "$base/read"
}

# fetch ADDRESS FILE HASH: one file of the archive, checked against the hash from the signed index.
fetch() {
    local helper
    for helper in /usr/lib/apt/apt-helper /usr/libexec/apt/apt-helper; do
        [[ -x $helper ]] || continue
        "$helper" -o Acquire::Retries=3 -o APT::Sandbox::User=root download-file "$1" "$2" "$3" >/dev/null 2>&1 && return 0
    done
    tell "cannot fetch ${2##*/}"
    return 1
}

install_packages() {
    ((EUID == 0)) || { tell "missing, and only root can add them: $*"; return 1; }
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq install -y --no-install-recommends "$@" >"$scratch/add.log" 2>&1 ||
        { apt-get -qq update && apt-get -qq install -y --no-install-recommends "$@"; } >>"$scratch/add.log" 2>&1 ||
        { tail -n 3 "$scratch/add.log" >&2; return 1; }
}

note() { mkdir -p "$prefix/share/criu"; printf '%s\n' "$@" >"$prefix/share/criu/ORIGIN"; }

try_packages() {
    local suite version address_of file size hash libs
    command -v patchelf >/dev/null || install_packages patchelf || return 1
    for suite in "${suites[@]}"; do
        look_into "$suite" || continue
        version=$(apt-cache "${apt_of[@]}" show criu 2>/dev/null | awk '$1 == "Version:" { print $2 }' | sort -V | tail -n 1)
        [[ -n $version ]] && dpkg --compare-versions "${version%-*}" ge "$least" || continue
        local tree=$scratch/tree-$suite
        mkdir -p "$tree" "$scratch/debs"
        # The status file is empty, so apt names all that criu needs, the C library included.
        apt-get "${apt_of[@]}" install --print-uris -qq -y --no-install-recommends "criu=$version" 2>/dev/null |
            awk '$2 ~ /^(criu|lib|zlib1g)/ && $2 !~ /^(libpython|libperl|libstdc)/' >"$scratch/wanted"
        [[ -s $scratch/wanted ]] || continue
        while read -r address_of file size hash; do
            address_of=${address_of//\'/}
            fetch "$address_of" "$scratch/debs/$file" "$hash" && dpkg-deb -x "$scratch/debs/$file" "$tree" || continue 2
        done <"$scratch/wanted"
        libs=$prefix/lib/criu-${version//[^A-Za-z0-9.]/_}
        rm -rf "$libs"
        mkdir -p "$libs" "$prefix/sbin"
        find "$tree" \( -name 'lib*.so*' -o -name 'ld-linux*.so*' \) ! -path '*/gconv/*' ! -path '*/security/*' \
            -exec cp -an -t "$libs" {} +
        relink "$tree/usr/sbin/criu" "$libs" || continue
        note "from: packages" "suite: $suite" "version: $version"
        new_enough && return 0
        tell "the package of suite $suite does not run here"
    done
    return 1
}

# relink PROGRAM LIBS: writes loader and library path into the program and every library, then puts it in place.
relink() {
    local loader library
    loader=$(find "$2" -name 'ld-linux*.so*' | head -n 1)
    [[ -n $loader ]] || { tell "no loader among the packages"; return 1; }
    cp "$1" "$program.fresh"
    patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$2" "$program.fresh" || return 1
    for library in "$2"/lib*.so*; do
        [[ -L $library || ${library##*/} == libc.so.* ]] || patchelf --force-rpath --set-rpath "$2" "$library" 2>/dev/null || true
    done
    chmod 755 "$program.fresh"
    mv -f "$program.fresh" "$program"
}

try_source() {
    local suite version address_of file size hash missing=() package source=$scratch/source
    for package in gcc make libc6-dev pkg-config python3 xz-utils protobuf-compiler protobuf-c-compiler libprotobuf-dev \
        libprotobuf-c-dev libnl-3-dev libcap-dev libnet1-dev uuid-dev libbsd-dev libgnutls28-dev libnftables-dev; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
    done
    ((${#missing[@]} == 0)) || install_packages "${missing[@]}" || return 1
    for suite in "${suites[@]}"; do
        look_into "$suite" || continue
        version=$(apt-cache "${apt_of[@]}" showsrc --only-source criu 2>/dev/null | awk '$1 == "Version:" { print $2 }' | sort -V | tail -n 1)
        [[ -n $version ]] && dpkg --compare-versions "${version%-*}" ge "$least" || continue
        read -r address_of file size hash <<<"$(apt-get "${apt_of[@]}" source --print-uris --only-source "criu=$version" 2>/dev/null |
            grep -m 1 '\.orig\.tar\.[a-z0-9]* ')" || true
        [[ -n ${file:-} ]] || continue
        fetch "${address_of//\'/}" "$scratch/$file" "$hash" || continue
        rm -rf "$source"
        mkdir -p "$source" "$prefix/sbin"
        tar -xf "$scratch/$file" -C "$source" --strip-components=1 || continue
        tell "compiling criu ${version%-*}, about a minute"
        make -C "$source" -j "$(nproc)" criu >"$scratch/make.log" 2>&1 || { tail -n 8 "$scratch/make.log" >&2; continue; }
        install -m 755 "$source/criu/criu" "$program.fresh"
        mv -f "$program.fresh" "$program"
        note "from: source" "suite: $suite" "file: $file" "hash: $hash"
        new_enough && return 0
    done
    return 1
}

case $from in
    packages) try_packages || fail "no package of criu $least or later runs here" ;;
    source)   try_source || fail "criu $least or later could not be compiled here" ;;
    any)      try_packages || try_source || fail "criu $least or later could not be had: see the lines above" ;;
esac
conclude "new here"
