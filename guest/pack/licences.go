package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// licences puts the terms of everything doz carries into licences/: the kernel's, the
// tools layer's list (whose own terms are in the layer, under share/doc), and those of
// Go and of every module that is linked into one of the programs.
func (p *packer) licences() error {
	for name, source := range map[string]string{
		"kernel/GPL-2.0.txt":            "guest/kernel/GPL-2.0.txt",
		"kernel/Linux-syscall-note.txt": "guest/kernel/Linux-syscall-note.txt",
		"kernel/PROVENANCE.md":          "guest/kernel/PROVENANCE.md",
		"tools/PACKAGES.md":             "guest/tools/PACKAGES.md",
		"go/LICENSE":                    "guest/pack/licence-go.txt",
	} {
		if err := p.copy("licences/"+name, source); err != nil {
			return err
		}
	}
	modules, err := linkedModules(p.arch)
	if err != nil {
		return err
	}
	for name, dir := range modules {
		terms, err := licenceFiles(dir)
		if err != nil {
			return err
		}
		if len(terms) == 0 {
			return fmt.Errorf("module %s has no licence file, and cannot be passed on", name)
		}
		for _, file := range terms {
			if err := p.copy("licences/modules/"+name+"/"+filepath.Base(file), file); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *packer) copy(name, source string) error {
	data, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	return p.write(name, data)
}

// linkedModules gives the folder of each module, by path@version, whose packages are
// in one of the programs.
func linkedModules(arch string) (map[string]string, error) {
	cmd := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}}@{{.Version}}\t{{.Dir}}{{end}}{{end}}", "./cmd/doz", "./cmd/deckhold")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+goArch[arch])
	cmd.Stderr = os.Stderr
	list, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("cannot list the modules linked in: %w", err)
	}
	modules := map[string]string{}
	for line := range strings.Lines(string(list)) {
		if name, dir, ok := strings.Cut(strings.TrimSpace(line), "\t"); ok {
			modules[name] = dir
		}
	}
	return modules, nil
}

// licenceFiles are the files of a folder that carry terms, by their names.
func licenceFiles(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var files []string
	for _, e := range entries {
		name := strings.ToUpper(e.Name())
		for _, word := range []string{"LICENSE", "LICENCE", "COPYING", "NOTICE", "PATENTS"} {
			if strings.HasPrefix(name, word) && e.Type().IsRegular() {
				files = append(files, filepath.Join(dir, e.Name()))
			}
		}
	}
	return files, nil
}
