# Package managers, without a registry: packages are made here, and come by `file:`.

# Checksums of all files below a directory, with mode and number of names, but for the output.
facts_of_tree() {
    (cd "$1" && find . -name .out -prune -o -printf '%y %m %p %l\n' | sort)
    (cd "$1" && find . -name .out -prune -o -type f -print0 | sort -z | xargs -0 -r sha256sum)
}

# A package NAME in DIR/NAME, and DIR/NAME-1.0.0.tgz.
make_js_package() {
    mkdir -p "$1/$2/lib"
    printf '{"name":"%s","version":"1.0.0","main":"lib/0.js","bin":{"%s":"lib/0.js"}}\n' "$2" "$2" >"$1/$2/package.json"
    for i in $(seq 0 60); do echo "module.exports = '$2 $i'" >"$1/$2/lib/$i.js"; done
    ln -s 0.js "$1/$2/lib/link.js"
    (cd "$1" && npm pack --silent "./$2" >/dev/null)
}

make_js_project() {
    make_js_package "$1" alpha
    make_js_package "$1" beta
    mkdir "$1/app"
    cat >"$1/app/package.json" <<'JSON'
{"name":"app","version":"1.0.0","private":true,
 "dependencies":{"alpha":"file:../alpha-1.0.0.tgz","beta":"file:../beta-1.0.0.tgz"}}
JSON
    echo "console.log(require('alpha'), require('beta'))" >"$1/app/index.js"
}

needs_npm_pack="node npm"
make_npm_pack() { make_js_package "$1" alpha; }
use_npm_pack() {
    cd "$1" || return
    npm pack --json --pack-destination "$2" ./alpha
    (cd "$2" && sha256sum ./*.tgz && tar tvf alpha-1.0.0.tgz | sort)
}

needs_npm_ci="node npm"
make_npm_ci() {
    make_js_project "$1"
    cd "$1/app" && npm install --silent --offline --no-audit --no-fund --cache "$1.cache" --package-lock-only
}
use_npm_ci() {
    cp -r "$1/app" "$2/app" && cp "$1"/*.tgz "$2" || return
    for at in "$1/app" "$2/app"; do
        cd "$at" || return
        # Twice: the second run removes what the first one made.
        npm ci --silent --offline --no-audit --no-fund --cache "$2/cache" || return
        npm ci --silent --offline --no-audit --no-fund --cache "$2/cache" || return
        node index.js
        npm ls --all
        facts_of_tree node_modules | grep -v .package-lock.json
    done
}

needs_pnpm="node npm pnpm"
make_pnpm() { make_js_project "$1"; }
use_pnpm() {
    cp -r "$1/app" "$2/app" && cp "$1"/*.tgz "$2" || return
    for at in "$1/app" "$2/app"; do
        cd "$at" || return
        pnpm install --silent --offline --no-frozen-lockfile --store-dir "$2/store" --package-import-method hardlink || return
        node index.js
        pnpm store status --store-dir "$2/store"
        find node_modules -name '*.js' -printf '%n %p\n' | sort
    done
    find "$2/store" -type f -links 3 | wc -l
    rm -rf "$1/app/node_modules"
    find "$2/app/node_modules/" -name '*.js' -printf '%n %p\n' | sort
}

needs_yarn="node npm yarn"
make_yarn() { make_js_project "$1"; }
use_yarn() {
    cp -r "$1/app" "$2/app" && cp "$1"/*.tgz "$2" || return
    export YARN_ENABLE_TELEMETRY=0 YARN_NODE_LINKER=pnpm YARN_GLOBAL_FOLDER="$2/yarn" \
        YARN_ENABLE_NETWORK=0 YARN_CACHE_FOLDER="$2/yarn/cache" YARN_ENABLE_COLORS=0 YARN_ENABLE_GLOBAL_CACHE=1 YARN_NM_MODE=hardlinks-global
    for at in "$1/app" "$2/app"; do
        cd "$at" || return
        touch yarn.lock
        yarn install --no-immutable | grep -v -e 'Done' -e 'Completed' || return
        yarn install --immutable >/dev/null || return
        node index.js
        find node_modules -name '*.js' -printf '%n %p\n' | sort
    done
}

needs_uv="python3 uv"
make_uv() {
    python3 - "$1" <<'PY'
import sys, zipfile
at = sys.argv[1]
with zipfile.ZipFile(f"{at}/small-1.0-py3-none-any.whl", "w") as wheel:
    for i in range(60):
        wheel.writestr(f"small/m{i}.py", f"value = {i}\n")
    wheel.writestr("small/__init__.py", "name = 'small'\n")
    info = "small-1.0.dist-info"
    wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
    wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    names = wheel.namelist()
    wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names + [f"{info}/RECORD"]))
PY
}
use_uv() {
    for mode in hardlink copy clone; do
        uv venv -q --no-python-downloads --offline --python "$(command -v python3)" "$2/$mode" || return
        uv pip install -q --offline --no-index --cache-dir "$2/cache" --link-mode "$mode" \
            --python "$2/$mode/bin/python" "$1/small-1.0-py3-none-any.whl"
        "$2/$mode/bin/python" -c 'import small.m7; print(small.name, small.m7.value)'
        find "$2/$mode" -path '*/small/*.py' -printf '%n %f\n' | sort
        uv pip check -q --python "$2/$mode/bin/python"
    done
    uv cache clean -q --cache-dir "$2/cache"
    find "$2/hardlink" -path '*/small/*.py' -printf '%n %f\n' | sort
}

needs_cargo="cargo gcc"
make_cargo() {
    mkdir -p "$1/src" "$1/part/src"
    printf '[package]\nname="whole"\nversion="1.0.0"\nedition="2021"\n[dependencies]\npart={path="part"}\n' >"$1/Cargo.toml"
    printf '[package]\nname="part"\nversion="1.0.0"\nedition="2021"\n' >"$1/part/Cargo.toml"
    echo 'pub fn seven() -> u32 { 7 }' >"$1/part/src/lib.rs"
    echo 'fn main() { println!("{}", part::seven()) }' >"$1/src/main.rs"
    cd "$1" && CARGO_TARGET_DIR="$1/target" cargo build -q --offline
}
use_cargo() {
    cd "$1" || return
    # What was built in the source is fresh in its copy but for paths, and what is built is kept.
    for target in "$1/target" "$2/target"; do
        export CARGO_TARGET_DIR="$target"
        cargo run -q --offline || return
        cargo build -v --offline 2>&1 | grep -c Fresh
        echo 'pub fn seven() -> u32 { 8 }' >part/src/lib.rs
        cargo run -q --offline
        echo 'pub fn seven() -> u32 { 7 }' >part/src/lib.rs
    done
    cargo clean -q --offline
    ls -A "$2" | grep target || true
}
